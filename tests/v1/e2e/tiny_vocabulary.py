# SPDX-License-Identifier: Apache-2.0
"""Random models with a vocabulary so small that all outputs can be counted.

The target's next token depends mostly on the last one, and somewhat on all before it.
Drafters only know the former, so drafts are often right, and often wrong.
"""

from pathlib import Path
from typing import Any

import torch

from tests.checkpoints.tensors import (
    EMBED,
    LM_HEAD,
    Tensors,
    shapes_of,
    write_checkpoint,
)
from tests.checkpoints.words import save_words

# Words for grammars; token 0 ends a text.
WORDS = ("</s>", "a", "b", "c", "d", "e")
VOCAB = len(WORDS)
HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM = 64, 64, 2, 32
LAYERS = 4
AUX_LAYERS = [1, 2, 3]
MASK = VOCAB - 1
# Those with "-small" know only some of the tokens, with ids of their own.
MODES = ("draft", "pard", "pard2", "eagle3", "peagle", "draft-small", "eagle3-small")
KNOWN_TOKENS = (0, 1, 3, 4)
# Vocabulary of small draft models: these tokens, and words that the target lacks.
SMALL_WORDS = ("x", "c", "</s>", "y", "d", "a")
# Weight of a layer's output beside the embedding, and of hidden states in a head.
LAYERS_SHARE = 0.3
# Noise in the drafters' weights, and scale of what PARD-2 adds to its embeddings.
NOISE = 0.1

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VOCAB,
    "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
    "norm_before_residual": True,
}
PARD2_SCALE = 0.02
PARD2 = {
    "spd_type": "pard2",
    "pard2_scale": PARD2_SCALE,
    "pard2_target_layers": [-1, -3],
    "pard2_target_dim": 2 * HIDDEN,
    "pard2_proj_bias": False,
}


def write_models(folder: Path) -> dict[str, Path]:
    """The target and a drafter of each mode, by name."""
    torch.manual_seed(0)
    target = llama_weights()
    pard = LLAMA | {"pard_token": MASK}
    mask = {"mask_hidden": normal(1, 3 * HIDDEN)}
    checkpoints = {
        "target": (LLAMA, target),
        "draft": (LLAMA, noisy(target)),
        "pard": (pard, noisy(target)),
        "pard2": (pard | PARD2, noisy(target)),
        "eagle3": (LLAMA | HEAD, head_weights(target)),
        "peagle": (LLAMA | HEAD | {"ptd_token_id": MASK}, head_weights(target) | mask),
    }
    checkpoints["eagle3-small"] = reduced(*checkpoints["eagle3"])
    checkpoints["draft-small"] = with_small_words(*checkpoints["draft"])
    folders = {
        name: write_checkpoint(folder / name, *made)
        for name, made in checkpoints.items()
    }
    for name, words in (("target", WORDS), ("draft-small", SMALL_WORDS)):
        numbered = {word: token for token, word in enumerate(words)}
        save_words(numbered, WORDS[0], folders[name])
    projection = matrix(HIDDEN, 2 * HIDDEN, gain=NOISE / PARD2_SCALE)
    torch.save({"target_proj.weight": projection}, folders["pard2"] / "warp_model.bin")
    return folders


def reduced(config: dict[str, Any], weights: Tensors) -> Any:
    """A head that drafts only `KNOWN_TOKENS`; d2t has the offsets of their ids."""
    known = torch.tensor(KNOWN_TOKENS)
    rows = {"lm_head.weight": weights["lm_head.weight"][known].clone()}
    offsets = {"d2t": known - torch.arange(len(known))}
    return config | {"draft_vocab_size": len(known)}, weights | rows | offsets


def with_small_words(config: dict[str, Any], weights: Tensors) -> Any:
    """A draft model of `SMALL_WORDS`; words that the target lacks copy known ones."""
    alike = {"x": "c", "y": "d"}
    rows = [WORDS.index(alike.get(word, word)) for word in SMALL_WORDS]
    tables = {name: weights[name][rows].clone() for name in (EMBED, LM_HEAD)}
    ids = {"vocab_size": len(rows), "eos_token_id": SMALL_WORDS.index(WORDS[0])}
    return config | ids, weights | tables


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape) * std


def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    return normal(rows, columns, std=gain * columns**-0.5)


def llama_weights() -> Tensors:
    embed, lm_head = normal(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN, gain=1.5)
    return {EMBED: embed, LM_HEAD: lm_head} | layer_weights()


def layer_weights(prefix: str = "model.") -> Tensors:
    """Weights of the layers, and of norms, which are ones."""
    weights = {}
    for name, shape in shapes_of(LLAMA).items():
        gain = LAYERS_SHARE if "o_proj" in name or "down_proj" in name else 1.0
        if name.startswith(prefix) and name != EMBED:
            weights[name] = (
                matrix(*shape, gain) if len(shape) > 1 else torch.ones(shape)
            )
    return weights


def head_weights(target: Tensors) -> Tensors:
    """An EAGLE-3 head that predicts the target's next token from the last one alone.

    Attention only reads the embedding, which is concatenated with the hidden state, and
    by it attends to the slot's own token. The hidden state adds noise.
    """
    embedding = torch.eye(HIDDEN, 2 * HIDDEN)
    layer = layer_weights(first := "model.layers.0.")
    weights = {n.replace(first, "midlayer."): w for n, w in layer.items()} | {
        "midlayer.self_attn.q_proj.weight": 2 * embedding,
        "midlayer.self_attn.k_proj.weight": embedding,
        "midlayer.self_attn.v_proj.weight": embedding,
        "midlayer.self_attn.o_proj.weight": torch.eye(HIDDEN),
        "midlayer.hidden_norm.weight": torch.full((HIDDEN,), LAYERS_SHARE),
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": target["lm_head.weight"],
    }
    return {name: tensor.clone() for name, tensor in weights.items()}


def noisy(weights: Tensors) -> Tensors:
    return {
        name: tensor + normal(*tensor.shape, std=NOISE * float(tensor.std()))
        if tensor.dim() == 2
        else tensor.clone()
        for name, tensor in weights.items()
    }
