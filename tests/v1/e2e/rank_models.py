# SPDX-License-Identifier: Apache-2.0
"""Models for two ranks: drafters that can be split, and a mixture of experts."""

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

EXPERTS = 4


def with_even_heads(model: Path, folder: Path) -> Path:
    """The model, or a copy in `folder` with one more head that computes the same.

    The added head's queries are zeros, and the output projection ignores it.

    Raises:
        ValueError: its heads do not share one KV head, so none can simply be added.
    """
    config = json.loads((model / "config.json").read_text())
    # A speculators checkpoint has its layers' config in a key of its own. Those here
    # have an even number of heads.
    layers = config.get("transformer_layer_config", config)
    heads = layers["num_attention_heads"]
    if heads % 2 == 0:
        return model
    if layers is not config or config["num_key_value_heads"] != 1:
        raise ValueError(f"{model.name}: {heads} heads do not share one KV head")
    place = folder / f"{model.name}-{heads + 1}-heads"
    shutil.copytree(model, place)
    config["num_attention_heads"] = heads + 1
    (place / "config.json").write_text(json.dumps(config))
    for file in place.glob("*.safetensors"):
        _pad(file, config["head_dim"])
    return place


def _pad(path: Path, head_dim: int) -> None:
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith("self_attn.q_proj.weight"):
            weights[name] = F.pad(weight, (0, 0, 0, head_dim))
        elif name.endswith("self_attn.o_proj.weight"):
            weights[name] = F.pad(weight, (0, head_dim))
    save_file(weights, path, {"format": "pt"})


def as_mixture(model: Path, folder: Path) -> Path:
    """A Llama as a Qwen3-MoE whose experts are all copies of its MLP.

    EAGLE-3 supports it, and data-parallel ranks run it in lockstep. Its QK norms are
    only close to the identity, so its output differs from the Llama's.
    """
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    dense, weights = load_file(folder / "model.safetensors"), {}
    for name, tensor in dense.items():
        if ".mlp." not in name:
            weights[name] = tensor
            continue
        for expert in range(EXPERTS):
            own = name.replace(".mlp.", f".mlp.experts.{expert}.")
            weights[own] = tensor.clone()
    torch.manual_seed(0)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        router = torch.randn(EXPERTS, config["hidden_size"])
        weights[f"{layer}mlp.gate.weight"] = router.bfloat16()
        scale = dense[f"{layer}input_layernorm.weight"].float()
        for part in "qk":
            projection = dense[f"{layer}self_attn.{part}_proj.weight"].float()
            usual = (projection * scale).square().sum(1).mean().sqrt()
            norm = usual.expand(config["head_dim"]).bfloat16()
            weights[f"{layer}self_attn.{part}_norm.weight"] = norm.contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder
