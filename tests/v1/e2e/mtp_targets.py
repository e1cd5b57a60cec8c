# SPDX-License-Identifier: Apache-2.0
"""Tiny targets with an MTP module whose drafts are right, as in `target_models.py`.

A module gets one part of its token from the target's states, and the other from the
token. MiMo's gathers both from the slots before its own; in the others random layers
add a little to them.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.tensors import Tensors

from .target_models import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    NEAREST,
    SIZE,
    SIZES,
    A,
    B,
    directions,
    later,
    looking_back,
    save_target,
)

KV_HEADS = SIZES["num_key_value_heads"]


def save_mtp_target(name: str, folder: Path) -> Path:
    """Saves one of MTP_TARGETS."""
    save_target(name, folder)
    weights = load_file(folder / "model.safetensors")
    made = MTP_TARGETS[name](weights)
    weights |= {n: tensor.contiguous() for n, tensor in made.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    if name == "MiMo's":
        config["architectures"] = ["MiMoForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _mixed(first_by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[SIZE, SIZE] each: the first part of a state, counted on, and the second part of
    a token's embedding."""
    basis = directions()[: A + B]
    state = basis[:A].T @ later(first_by)[:A, :A] @ basis[:A]
    return state, basis[A:].T @ basis[A:]


def _mimo(weights: Tensors) -> Tensors:
    """A layer that gathers the parts of preceding slots, the nearest one first."""
    basis = directions()[: A + B]
    queries, keys = looking_back([1 + head for head in range(HEADS)])
    values = torch.zeros(KV_HEADS, HEAD_DIM, SIZE)
    values[:, : A + B] = basis / (SIZE / 2) ** 0.5
    out = torch.zeros(SIZE, HEADS, HEAD_DIM)
    for head in range(HEADS):
        turned = later(head + 1)  # of the token, which is one further than the state
        turned[:A, :A] = later(head + 2)[:A, :A]
        out[:, head, : A + B] = basis.T @ turned * 64 * NEAREST**-head
    hidden = torch.zeros(SIZES["intermediate_size"], SIZE)
    ones = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    ones += ("input_layernorm", "post_attention_layernorm")
    made = {f"{norm}.weight": torch.ones(SIZE) for norm in ones} | {
        "input_proj.weight": torch.cat(_mixed(first_by=0), dim=1),
        "self_attn.q_proj.weight": torch.zeros(HEADS * HEAD_DIM, SIZE),
        "self_attn.q_proj.bias": queries,
        "self_attn.k_proj.weight": torch.zeros(KV_HEADS * HEAD_DIM, SIZE),
        "self_attn.k_proj.bias": keys.repeat(KV_HEADS),
        "self_attn.v_proj.weight": values.flatten(0, 1),
        "self_attn.v_proj.bias": torch.zeros(KV_HEADS * HEAD_DIM),
        "self_attn.o_proj.weight": out.flatten(1),
        "mlp.gate_proj.weight": hidden,
        "mlp.up_proj.weight": hidden.clone(),
        "mlp.down_proj.weight": hidden.T,
    }
    return {f"model.mtp_layers.0.{name}": tensor for name, tensor in made.items()}


def _copied(weights: Tensors, into: str) -> Tensors:
    """The target's last layer, with outputs that are small beside a token's parts."""
    last, made = f"model.layers.{LAYERS - 1}.", {}
    for name, tensor in weights.items():
        if name.startswith(last):
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            made[into + name.removeprefix(last)] = tensor * (0.1 if is_output else 1)
    return made


def _qwen(weights: Tensors) -> Tensors:
    state, token = _mixed(first_by=1)
    norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
    made = {f"mtp.{norm}.weight": torch.zeros(SIZE) for norm in norms}
    made["mtp.fc.weight"] = torch.cat([token, state], dim=1)
    return made | _copied(weights, "mtp.layers.0.")


def _deepseek(weights: Tensors) -> Tensors:
    state, token = _mixed(first_by=1)
    layer = f"model.layers.{LAYERS}."
    norms = ("enorm", "hnorm", "shared_head.norm")
    made = {f"{layer}{norm}.weight": torch.ones(SIZE) for norm in norms}
    made[f"{layer}eh_proj.weight"] = torch.cat([token, state], dim=1)
    made[f"{layer}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    made[f"{layer}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return made | _copied(weights, layer)


MTP_TARGETS = {"MiMo's": _mimo, "Qwen3-Next's": _qwen, "DeepSeek-V3's": _deepseek}
