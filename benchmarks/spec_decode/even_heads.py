# SPDX-License-Identifier: Apache-2.0
"""Drafters that two GPUs can share: a head of zeros makes the number of heads even."""

import json
import shutil
from pathlib import Path


def with_even_heads(model: Path, folder: Path) -> Path:
    """The model, or a copy below `folder` with one more head: the same function.

    The added head's queries are zeros, and the projection behind it ignores it.

    Raises:
        ValueError: its heads do not share one KV head, so a head cannot just be added.
    """
    config = json.loads((model / "config.json").read_text())
    # A speculators checkpoint keeps its layers' config by itself; only even ones here.
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
    import torch.nn.functional as F
    from safetensors.torch import load_file, save_file

    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith("self_attn.q_proj.weight"):
            weights[name] = F.pad(weight, (0, 0, 0, head_dim))
        elif name.endswith("self_attn.o_proj.weight"):
            weights[name] = F.pad(weight, (0, head_dim))
    save_file(weights, path, {"format": "pt"})
