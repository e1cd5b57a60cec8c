# SPDX-License-Identifier: Apache-2.0
"""Drafters for vLLM's own speculators.

A small model with an MTP layer, whose drafts are right or wrong by construction, and a
DFlash drafter that draws at random.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SIZE = 128  # of the vocabulary, and of hidden states: an embedding is one number
CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save_counting_model(folder: Path, drafts_right: bool) -> Path:
    """A MiMo that says token t + 1 after t, as far as its random layers let it.

    Its MTP layer says the same of the token that it is fed, or t + 8.
    """
    torch.manual_seed(0)
    one, none = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    weights = {
        "model.embed_tokens.weight": one,
        "model.norm.weight": torch.ones(SIZE),
        "lm_head.weight": one.roll(1, 0),
    }
    for number in range(CONFIG["num_hidden_layers"]):
        weights |= _layer(f"model.layers.{number}.", 0.3)
    drafted = one if drafts_right else one.roll(7, 0)
    mtp = "model.mtp_layers.0."
    weights |= _layer(mtp, 0.02)
    weights[f"{mtp}input_proj.weight"] = torch.cat([none, drafted], dim=1)
    for part in ("token", "hidden", "final"):
        weights[f"{mtp}{part}_layernorm.weight"] = torch.ones(SIZE)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _layer(prefix: str, scale: float) -> dict[str, torch.Tensor]:
    """A random layer of Qwen2.

    Args:
        scale: of what it adds, beside an embedding of one.
    """
    weights = {
        f"{prefix}{part}_layernorm.weight": torch.ones(SIZE)
        for part in ("input", "post_attention")
    }
    for part in "qkvo":
        name = f"{prefix}self_attn.{part}_proj"
        weights[f"{name}.weight"] = torch.randn(SIZE, SIZE) / SIZE**0.5
        if part != "o":
            weights[f"{name}.bias"] = torch.zeros(SIZE)
    for part in ("gate", "up", "down"):
        name = f"{prefix}mlp.{part}_proj.weight"
        weights[name] = torch.randn(SIZE, SIZE) / SIZE**0.5
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"{prefix}{part}.weight"] *= scale
    return weights


def save_random_dflash(target: Path, folder: Path) -> Path:
    """A DFlash drafter of one random layer, for the bundled target."""
    config = json.loads((target / "config.json").read_text())
    size, heads, kv_heads = (
        config[key]
        for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head, inner = config["head_dim"], config["intermediate_size"]
    tapped = [1, 3, 5]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": tapped},
    }
    torch.manual_seed(0)
    shapes = {
        "fc": (size, len(tapped) * size),
        "layers.0.self_attn.q_proj": (heads * head, size),
        "layers.0.self_attn.k_proj": (kv_heads * head, size),
        "layers.0.self_attn.v_proj": (kv_heads * head, size),
        "layers.0.self_attn.o_proj": (size, heads * head),
        "layers.0.mlp.gate_proj": (inner, size),
        "layers.0.mlp.up_proj": (inner, size),
        "layers.0.mlp.down_proj": (size, inner),
    }
    weights = {
        name: torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"layers.0.{norm}"] = torch.ones(size)
    for norm in ("q_norm", "k_norm"):
        weights[f"layers.0.self_attn.{norm}"] = torch.ones(head)
    weights |= {"hidden_norm": torch.ones(size), "norm": torch.ones(size)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    named = {f"{name}.weight": weight for name, weight in weights.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder
