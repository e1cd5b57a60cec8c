# SPDX-License-Identifier: Apache-2.0
"""Random models of a vocabulary so small that all outputs can be counted."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 6
HIDDEN, INTERMEDIATE, HEADS, HEAD_DIM = 64, 64, 2, 32
LAYERS = 4
AUX_LAYERS = [1, 2, 3]
MASK = VOCAB - 1
# The heads with "-small" know some of the tokens only, and number them anew.
MODES = ("draft", "pard", "eagle3", "peagle", "eagle3-small", "peagle-small")
KNOWN_TOKENS = (0, 1, 3, 4)

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
}


def write_models(folder: Path) -> dict[str, Path]:
    """The target and a drafter of each mode, by name.

    The draft models are the target with noise on its weights, so that their drafts
    are often right and often wrong; the heads know nothing.
    """
    torch.manual_seed(0)
    target = llama_weights()
    checkpoints = {
        "target": (LLAMA, target),
        "draft": (LLAMA, noisy(target)),
        "pard": (LLAMA | {"pard_token": MASK}, noisy(target)),
        "eagle3": (LLAMA | HEAD, head_weights(layers=1)),
        "peagle": (
            LLAMA | HEAD | {"ptd_token_id": MASK},
            head_weights(layers=1) | {"mask_hidden": normal(1, 3 * HIDDEN)},
        ),
    }
    for name in ("eagle3", "peagle"):
        checkpoints[f"{name}-small"] = reduced(*checkpoints[name])
    return {name: write(folder / name, *made) for name, made in checkpoints.items()}


def reduced(
    config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head that drafts `KNOWN_TOKENS` only; d2t says how far off each one is."""
    known = torch.tensor(KNOWN_TOKENS)
    rows = {"lm_head.weight": weights["lm_head.weight"][known].clone()}
    offsets = {"d2t": known - torch.arange(len(known))}
    return config | {"draft_vocab_size": len(known)}, weights | rows | offsets


def write(folder: Path, config: dict[str, Any], weights: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors")
    return folder


def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape) * std


def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    return normal(rows, columns, std=gain * columns**-0.5)


def llama_weights() -> dict[str, torch.Tensor]:
    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, gain=1.5),
    }
    for i in range(LAYERS):
        weights |= layer_weights(f"model.layers.{i}.", HIDDEN)
    return weights


def layer_weights(prefix: str, width: int) -> dict[str, torch.Tensor]:
    """A decoder layer whose attention reads rows of `width`."""
    size = HEADS * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (size, width),
        "self_attn.k_proj": (size, width),
        "self_attn.v_proj": (size, width),
        "self_attn.o_proj": (HIDDEN, size),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    weights = {f"{prefix}{name}.weight": matrix(*s) for name, s in shapes.items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    return weights


def head_weights(layers: int) -> dict[str, torch.Tensor]:
    """An EAGLE-3 head: its first layer reads embeddings beside hidden states."""
    weights = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, gain=1.5),
    }
    for i in range(layers):
        weights |= layer_weights(f"midlayer.{i}." if i else "midlayer.", 2 * HIDDEN)
    weights["midlayer.hidden_norm.weight"] = torch.ones(HIDDEN)
    return weights


def noisy(weights: dict[str, torch.Tensor], share: float = 0.3) -> dict[str, Any]:
    return {
        name: tensor + normal(*tensor.shape, std=share * float(tensor.std()))
        if tensor.dim() == 2
        else tensor.clone()
        for name, tensor in weights.items()
    }
