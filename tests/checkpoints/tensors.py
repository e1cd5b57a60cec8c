# SPDX-License-Identifier: Apache-2.0
"""Random weights of drafters and targets, with the tensor names of real checkpoints.

They depend only on the tensor's name and shape. Their scale keeps activations near one,
so that logits differ by far more than rounding errors.
"""

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

Config = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Attention is sharp, and layer outputs are larger than the residual: otherwise all
# tokens of a draft are the same.
GAINS = {"q_proj": 2, "k_proj": 2, "o_proj": 6, "down_proj": 6}


def random(name: str, *shape: int) -> torch.Tensor:
    """float32 values; a vector is a bias, or the weight of a norm and near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{shape}".encode()))
    values = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        return values / 4 + (not name.endswith(".bias"))
    gain = next((g for part, g in GAINS.items() if part in name), 1)
    return values * gain / shape[-1] ** 0.5


def shapes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of a language model in transformers; tied tensors appear once."""
    model_type = config["model_type"].removesuffix("_peagle")
    known = AutoConfig.for_model(**config | {"model_type": model_type})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def language_model(config: Config, copies_lm_head: bool = False) -> Tensors:
    """Tensors of a language model; `copies_lm_head` adds a tied lm_head."""
    short = {EMBED: "embed", "model.norm.weight": "norm", LM_HEAD: "lm_head"}
    made = {n: random(short.get(n, n), *s) for n, s in shapes_of(config).items()}
    made[EMBED] *= 4
    if copies_lm_head:
        made[LM_HEAD] = made[EMBED].clone()
    return made


def head(
    config: Config,
    num_taps: int,
    *,
    first: str = "layers.0",  # name of layer 0
    later: str = "layers.{}",
    embed: bool = True,
) -> Tensors:
    """Tensors of an EAGLE-3 head, without `d2t` and `mask_hidden`.

    Its first layer takes the token's embedding as well.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes = {f"{first}.hidden_norm.weight": (hidden,)}
    for name, shape in shapes_of(config).items():
        if match := re.match(r"model\.layers\.(\d+)\.(.*)", name):
            at = later.format(match[1]) if int(match[1]) else first
            is_fed = at == first and re.search(r"[qkv]_proj\.weight", name)
            shapes[f"{at}.{match[2]}"] = (shape[0], 2 * hidden) if is_fed else shape
    made = {name: random(name, *shape) for name, shape in shapes.items()}
    made["fc.weight"] = random("fc", hidden, num_taps * hidden)
    made["norm.weight"] = random("norm", hidden)
    made[LM_HEAD] = random("lm_head", config["draft_vocab_size"], hidden)
    if embed:
        made["embed_tokens.weight"] = random("embed", vocab, hidden) * 4
    return made


def draft_vocabulary(vocab: int, rows: int, dtype: torch.dtype) -> Tensors:
    """`d2t`, offsets from draft ids to target ids, and `t2d`, a mask of used ids."""
    kept = torch.arange(rows) * vocab // rows
    used = torch.zeros(vocab, dtype=torch.bool)
    used[kept] = True
    return {"d2t": (kept - torch.arange(rows)).to(dtype), "t2d": used}


def write_checkpoint(
    folder: Path, config: Config, tensors: Tensors, files: str = "safetensors"
) -> Path:
    """Writes config.json and weights; see `Published.files` for `files`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_torch_state_dict(
        tensors,
        folder,
        max_shard_size=size // 2 if files == "sharded" else size,
        safe_serialization=files != "bin",
    )
    return folder
