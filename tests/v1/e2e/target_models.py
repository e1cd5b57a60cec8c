# SPDX-License-Identifier: Apache-2.0
"""Tiny targets of common architectures, and drafters whose drafts are right.

A target has random layers between constructed embeddings and lm_head: after token t,
t + 1 is the likeliest. Its layers determine by how much, so its greedy output is known,
and its sampled output depends on the contents of all its caches and states.

A drafter counts on, too. It represents a token t by two parts, t modulo 9 and t modulo
11. Neither part can be derived from the other, and they come from different inputs: in
a head that is fed hidden states, one from the state and one from the token. Both are
gathered from other slots, by attention that looks back a fixed number of positions. So
a draft is right only if the token, hidden state, position and KV cache slot are.
"""

import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.checkpoints.tensors import Tensors, write_checkpoint

A, B = 9, 11  # coprime
TOKENS = A * B  # tokens to count with; the rest of the vocabulary is never likely
VOCAB, SIZE = 128, 128  # of a target
MASK = VOCAB - 1
LAYERS = 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": TOKENS,
    "eos_token_id": TOKENS + 1,
    "pad_token_id": None,
}
WINDOWS = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "initializer_range": 0.04,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
    "num_experts": 4,
    "shared_expert_intermediate_size": 64,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "ssm_state_size": 32,
}
K = 4  # drafts
# The last step ends with the answer: tokens past it would not count as accepted.
NUM_TOKENS = 1 + 6 * (K + 1)
HEADS, HEAD_DIM, ROPE_THETA = 4, 32, 10.0  # of drafters, and of MiMo
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# Named as in `docs/targets.md`: config class, and its keys besides SIZES.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Qwen3": ("Qwen3Config", {}),
    "gpt-oss": ("GptOssConfig", WINDOWS | {"num_local_experts": 4}),
    "Gemma 3": ("Gemma3TextConfig", WINDOWS),
    "Qwen3-MoE": ("Qwen3MoeConfig", EXPERTS | {"num_experts": 4}),
    "DeepSeek-V2": ("DeepseekV2Config", EXPERTS | LATENT),
    "Qwen3-Next": ("Qwen3NextConfig", EXPERTS | DELTA_NET),
    "Nemotron-H": ("NemotronHConfig", NEMOTRON),
    # For an MTP module: see `mtp_targets.py`.
    "MiMo's": ("Qwen2Config", ROPE),
    "Qwen3-Next's": ("Qwen3NextConfig", EXPERTS | DELTA_NET),
    "DeepSeek-V3's": ("DeepseekV3Config", EXPERTS | LATENT | SIGMOID),
}


def prompt(length: int, step: int = 1) -> list[int]:
    """A random prompt that ends with tokens to count on from."""
    rng = random.Random(length)
    first = rng.randrange(TOKENS)
    tail = [(first + step * i) % TOKENS for i in range(8)]
    return [rng.randrange(TOKENS) for _ in range(length - len(tail))] + tail


def greedy_output(length: int, step: int = 1) -> list[int]:
    """The expected greedy output for a prompt."""
    last = prompt(length, step)[-1]
    return [(last + step * i) % TOKENS for i in range(1, NUM_TOKENS + 1)]


def directions() -> torch.Tensor:
    """[SIZE, SIZE], an orthonormal basis of a target's states. The first A + B
    directions are those of both parts of a token, the next one is that of a mask."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator)).Q


def parts(tokens: torch.Tensor) -> torch.Tensor:
    """[n, A + B], one-hot encodings of both parts; zeros for tokens >= TOKENS."""
    found = torch.zeros(len(tokens), A + B)
    found[torch.arange(len(tokens)), tokens % A] = 1
    found[torch.arange(len(tokens)), A + tokens % B] = 1
    return found * (tokens < TOKENS)[:, None]


def save_target(name: str, folder: Path, seed: int = 0, step: int = 1) -> Path:
    """Saves a target that counts by `step`; another than 1 changes its embeddings."""
    kind, more = TARGETS[name]
    config = getattr(transformers, kind)(**SIZES | more)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plant(model, step)
    model.save_pretrained(folder)
    return folder


def plant(model: torch.nn.Module, step: int) -> None:
    """Makes a model predict t + step after t, unless its layers outweigh that."""
    tokens, scale = torch.arange(VOCAB), (SIZE / 2) ** 0.5
    generator = torch.Generator().manual_seed(1)
    numbers = tokens.clone()  # after a token, the one with the next number is predicted
    numbers[:TOKENS] = tokens[:TOKENS] * pow(step, -1, TOKENS) % TOKENS
    table = parts(numbers) @ directions()[: A + B] * scale
    table[TOKENS:] = torch.randn(VOCAB - TOKENS, SIZE, generator=generator)
    rows = parts((numbers - 1) % TOKENS) @ directions()[: A + B] * scale * (16 / SIZE)
    rows[TOKENS:] = 0
    with torch.no_grad():
        embedding = model.get_input_embeddings()
        embedding.weight.copy_(table / getattr(embedding, "scalar_embed_scale", 1))
        model.get_output_embeddings().weight.copy_(rows)
        for name, weight in model.named_parameters():
            # Gemma's norms of layer outputs, which would weigh as much as embeddings.
            is_gemma = "gemma" in model.config.model_type
            if is_gemma and re.search(r"post_(attention|feedforward)_layern", name):
                weight.fill_(-0.7)


def save_adapter(folder: Path) -> Path:
    """A LoRA adapter of a Llama, for v_proj and lm_head."""
    generator, rank = torch.Generator().manual_seed(2), 8
    sizes = {f"model.layers.{i}.self_attn.v_proj": 64 for i in range(LAYERS)}
    tensors = {}
    for name, size in (sizes | {"lm_head": VOCAB}).items():
        for part, shape in (("A", (rank, SIZE)), ("B", (size, rank))):
            values = torch.randn(*shape, generator=generator) / 8
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    config["target_modules"] = ["v_proj", "lm_head"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


# Drafters.

WIDTH = 64  # hidden size
DRAFTER = {
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HEADS * A,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rope_theta": ROPE_THETA,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": True,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": TOKENS,
    "eos_token_id": TOKENS + 1,
}
# Columns of a drafter's hidden states: both parts, whether a token is known, a filler.
KNOWN, FILLER = A + B, WIDTH - 1
REDUCED = 112  # tokens of an EAGLE-3 head
NEAREST = 3.0  # ratio of a slot's weight to that of the slot before it
SURE = 16.0  # scale of logits; high, so that trees contain the likeliest chain


def looking_back(distances: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of queries and keys with which each head looks back by its distance."""
    half = HEAD_DIM // 2
    angles = ROPE_THETA ** -(torch.arange(half) / half)
    turned = torch.tensor(distances)[:, None] * angles
    queries = torch.cat([turned.cos(), -turned.sin()], dim=1) * 60
    keys = torch.cat([torch.ones(half), torch.zeros(half)])
    return queries.flatten(), keys


def later(by: int) -> torch.Tensor:
    """[A + B, A + B], maps the parts of t to those of t + by."""
    turned = torch.zeros(A + B, A + B)
    for size, begin in ((A, 0), (B, A)):
        at = torch.arange(size)
        turned[begin + (at + by) % size, begin + at] = 1
    return turned


def _layer(name: str, nearest: int, fed: int) -> Tensors:
    """A layer, fed so many columns, that gathers parts of preceding tokens, and maps
    them to the next. The first head looks back by `nearest`, each other one further."""
    distances = [nearest + head for head in range(HEADS)]
    queries, keys = looking_back(distances)
    values = torch.zeros(HEAD_DIM, fed)
    values[: KNOWN + 1, : KNOWN + 1] = torch.eye(KNOWN + 1)
    out = torch.zeros(WIDTH, HEADS, HEAD_DIM)
    for head, distance in enumerate(distances):
        weight = 8 * NEAREST**-head
        out[: A + B, head, : A + B] = later(distance + 1) * weight
    hidden = torch.zeros(DRAFTER["intermediate_size"], WIDTH)
    return {
        f"{name}.{part}": tensor
        for part, tensor in {
            "input_layernorm.weight": torch.ones(WIDTH),
            "post_attention_layernorm.weight": torch.ones(WIDTH),
            "self_attn.q_proj.weight": torch.zeros(HEADS * HEAD_DIM, fed),
            "self_attn.q_proj.bias": queries,
            "self_attn.k_proj.weight": torch.zeros(HEAD_DIM, fed),
            "self_attn.k_proj.bias": keys,
            "self_attn.v_proj.weight": values,
            "self_attn.v_proj.bias": torch.zeros(HEAD_DIM),
            "self_attn.o_proj.weight": out.flatten(1),
            "self_attn.o_proj.bias": torch.zeros(WIDTH),
            "mlp.gate_proj.weight": hidden,
            "mlp.up_proj.weight": hidden.clone(),
            "mlp.down_proj.weight": hidden.T.contiguous(),
        }.items()
    }


def _tables(embedded: torch.Tensor, said: torch.Tensor) -> Tensors:
    """Embeddings with parts `embedded`, and an lm_head that matches parts `said`."""
    embed, rows = torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH)
    embed[:, : A + B] = embedded
    embed[TOKENS:, FILLER] = 1
    rows[:, : A + B] = said * SURE
    return {"embed_tokens.weight": embed, "lm_head.weight": rows}


def save_pard(folder: Path, nearest: int = 0) -> Path:
    """A PARD that counts on from a slot's token, or for masks from the last known one;
    or from the token `nearest` slots before it."""
    known = parts(torch.arange(VOCAB))
    layer = _layer("layers.0", nearest, WIDTH)
    return _save_model(folder, _tables(known / 2**0.5, known), layer)


def _save_model(folder: Path, tables: Tensors, layer: Tensors, **more: Any) -> Path:
    made = layer | {"norm.weight": torch.ones(WIDTH)}
    made["embed_tokens.weight"] = tables.pop("embed_tokens.weight")
    tensors = {f"model.{name}": tensor for name, tensor in made.items()} | tables
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"pard_token": MASK}
    return write_checkpoint(folder, DRAFTER | config | more, tensors)


def save_pard2(folder: Path, nearest: int = 3) -> Path:
    """A PARD-2 that counts on from a slot at least three before its own.

    It gets one part from that slot's token, the other from the state the slot is fed.
    """
    by_token = parts(torch.arange(VOCAB))
    tables = _tables(by_token, by_token.clone())
    tables["embed_tokens.weight"][:, :A] = 0
    layer = _layer("layers.0", nearest, WIDTH)
    out = layer["layers.0.self_attn.o_proj.weight"].view(WIDTH, HEADS, HEAD_DIM)
    for head in range(HEADS):  # a slot is fed the state of the token before its own
        out[:A, head, :A] = later(nearest + head + 2)[:A, :A] * 8 * NEAREST**-head
    _save_model(
        folder,
        tables,
        layer,
        spd_type="pard2",
        pard2_proj_bias=False,
        pard2_scale=0.5,
        pard2_target_dim=2 * SIZE,
        pard2_target_layers=[-1, -2],
    )
    warp = torch.zeros(WIDTH, 2 * SIZE)
    warp[:A] = directions()[:A].repeat(1, 2) / (SIZE / 2) ** 0.5
    torch.save({"target_proj.weight": warp}, folder / "warp_model.bin")
    return folder


def save_head(folder: Path, is_parallel: bool, nearest: int = 1) -> Path:
    """An EAGLE-3 or P-EAGLE head that gets one part from states, the other from tokens.

    Its own hidden state contains the first part of its slot's token, so that later
    passes can be fed it instead of the target's states. It has only some of the tokens,
    in reverse order. The nearest slot that it uses is so many before its own.
    """
    config, tensors = _head(is_parallel, nearest)
    kept = torch.arange(REDUCED).flip(0)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
    tensors["d2t"] = kept - torch.arange(REDUCED)
    return write_checkpoint(folder, config | {"draft_vocab_size": REDUCED}, tensors)


def _head(is_parallel: bool, nearest: int = 1) -> tuple[dict[str, Any], Tensors]:
    tokens = torch.arange(VOCAB)
    by_token, said = parts(tokens), parts(tokens)
    by_token[:, :A] = 0
    said[:TOKENS, :A] = parts((tokens[:TOKENS] - 1) % TOKENS)[:, :A]
    layer = _layer("layers.0", nearest, 2 * WIDTH)
    values = layer["layers.0.self_attn.v_proj.weight"].zero_()
    values[range(A), range(WIDTH, WIDTH + A)] = 1  # from the state, after the embedding
    values[range(A, A + B), range(A, A + B)] = 1
    combine = torch.zeros(WIDTH, SIZE)
    combine[:A], combine[FILLER] = directions()[:A], directions()[A + B]
    made = _tables(by_token, said) | layer
    for norm in ("norm.weight", "layers.0.hidden_norm.weight"):
        made[norm] = torch.ones(WIDTH)
    made["fc.weight"] = combine.repeat(1, 3)
    config = DRAFTER | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": SIZE,
        "norm_before_residual": True,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        },
    }
    if is_parallel:
        config |= {"mask_token_id": MASK, "num_speculative_tokens": 4}
        made["mask_hidden"] = directions()[A + B].repeat(1, 1, 3)
    return config, made


def save_sharing_head(folder: Path) -> Path:
    """The EAGLE-3 head, with the target's embeddings and lm_head instead of its own.

    Its hidden states use the target's directions instead of columns. The target's
    lm_head matches the preceding token, so the second part is not mapped to the next.
    """
    config, tensors = _head(is_parallel=False)
    made, basis = {}, directions()[:WIDTH]
    into = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    into += ("gate_proj.weight", "up_proj.weight")
    for name, tensor in tensors.items():
        if name.endswith(into):
            tensor = (tensor.unflatten(1, (-1, WIDTH)) @ basis).flatten(1)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            if name.endswith("o_proj.weight"):
                tensor[A : A + B] = later(-1)[A:, A:] @ tensor[A : A + B]
            tensor = basis.T @ tensor
        elif name.endswith("o_proj.bias"):
            tensor = torch.zeros(SIZE)
        elif name.endswith("norm.weight"):
            tensor = torch.full((SIZE,), (WIDTH / SIZE) ** 0.5)
        if name not in ("embed_tokens.weight", "lm_head.weight"):
            made[name] = tensor
    return write_checkpoint(folder, config | {"hidden_size": SIZE}, made)


SAVE = {
    "pard": save_pard,
    "pard2": save_pard2,
    "eagle3": partial(save_head, is_parallel=False),
    "peagle": partial(save_head, is_parallel=True),
}
