# SPDX-License-Identifier: Apache-2.0
"""Drafters for vLLM's own speculators.

A small model with an MTP layer, whose drafts are right or wrong by construction, and a
DFlash drafter with random weights.
"""

import json
from pathlib import Path

import torch

from tests.checkpoints.tensors import random, shapes_of, write_checkpoint

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
    """A MiMo that predicts token t + 1 after t, unless its random layers outweigh that.

    Its MTP layer predicts the same from the token it is fed, or else t + 8.
    """
    one, none = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    layer, mtp = "model.layers.0.", "model.mtp_layers.0."
    shapes = shapes_of(CONFIG)
    for name in [name for name in shapes if name.startswith(layer)]:
        shapes[name.replace(layer, mtp)] = shapes[name]
    weights = {name: random(name, *shape) for name, shape in shapes.items()}
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            # Small output of layers, beside an embedding of one.
            weights[name] *= 0.003 if name.startswith(mtp) else 0.02
    for part in ("token", "hidden", "final"):
        weights[f"{mtp}{part}_layernorm.weight"] = torch.ones(SIZE)
    drafted = one if drafts_right else one.roll(7, 0)
    return write_checkpoint(
        folder,
        CONFIG,
        weights
        | {
            "model.embed_tokens.weight": one,
            "lm_head.weight": one.roll(1, 0),
            f"{mtp}input_proj.weight": torch.cat([none, drafted], dim=1),
        },
    )


def save_random_dflash(target: Path, folder: Path) -> Path:
    """A DFlash drafter of one random layer, for the bundled target."""
    config, tapped = json.loads((target / "config.json").read_text()), [1, 3, 5]
    config |= {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 2, "target_layer_ids": tapped},
    }
    size = config["hidden_size"]
    shapes = {
        name.removeprefix("model."): shape
        for name, shape in shapes_of(config).items()
        if "embed" not in name and "lm_head" not in name
    }
    shapes |= {"fc.weight": (size, len(tapped) * size), "hidden_norm.weight": (size,)}
    weights = {name: random(name, *shape) for name, shape in shapes.items()}
    return write_checkpoint(folder, config, weights)
