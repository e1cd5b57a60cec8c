# SPDX-License-Identifier: Apache-2.0
"""Random weights of drafters and targets, by the names real checkpoints have.

They depend on the tensor's name and shape alone. Their spread keeps activations near
one, so that logits differ by far more than rounding.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Config = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]
# Attention is sharp, and layers weigh more than what goes past them: else every token
# of a draft is the same.
GAINS = {"q_proj": 2, "k_proj": 2, "o_proj": 6, "down_proj": 6}


def random(name: str, *shape: int) -> torch.Tensor:
    """float32; a vector is a bias, or a norm's weight and near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{shape}".encode()))
    values = torch.randn(*shape, generator=generator)
    if len(shape) == 1:
        return values / 4 + (not name.endswith(".bias"))
    gain = next((g for part, g in GAINS.items() if part in name), 1)
    return values * gain / shape[-1] ** 0.5


def attention(config: Config, at: str, fed: int) -> Tensors:
    hidden, size = config["hidden_size"], head_dim(config)
    rows = {
        "q": config["num_attention_heads"] * size,
        "k": config["num_key_value_heads"] * size,
        "v": config["num_key_value_heads"] * size,
    }
    shapes = {f"{at}.{name}_proj.weight": (n, fed) for name, n in rows.items()}
    shapes[f"{at}.o_proj.weight"] = (hidden, rows["q"])
    if config["model_type"] in ("qwen2", "gpt_oss"):
        shapes |= {f"{at}.{name}_proj.bias": (n,) for name, n in rows.items()}
    if config["model_type"] == "gpt_oss":
        shapes[f"{at}.o_proj.bias"] = (hidden,)
        shapes[f"{at}.sinks"] = (config["num_attention_heads"],)
    if config["model_type"] == "qwen3":
        shapes |= {f"{at}.{name}_norm.weight": (size,) for name in "qk"}
    return {name: random(name, *shape) for name, shape in shapes.items()}


def head_dim(config: Config) -> int:
    return config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )


def layer(config: Config, at: str, is_first_of_head: bool = False) -> Tensors:
    """A decoder layer; the first one of a head is fed a token's embedding as well."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        f"{at}.input_layernorm.weight": (hidden,),
        f"{at}.post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "gpt_oss":
        shapes |= experts(config, f"{at}.mlp")
    else:
        shapes |= {
            f"{at}.mlp.gate_proj.weight": (inner, hidden),
            f"{at}.mlp.up_proj.weight": (inner, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, inner),
        }
    if is_first_of_head:
        shapes[f"{at}.hidden_norm.weight"] = (hidden,)
    made = {name: random(name, *shape) for name, shape in shapes.items()}
    return made | attention(config, f"{at}.self_attn", hidden * (1 + is_first_of_head))


def experts(config: Config, at: str) -> dict[str, tuple[int, ...]]:
    """Shapes of gpt-oss' experts, as they are where they are not quantized."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    number = config["num_local_experts"]
    return {
        f"{at}.router.weight": (number, hidden),
        f"{at}.router.bias": (number,),
        f"{at}.experts.gate_up_proj": (number, hidden, 2 * inner),
        f"{at}.experts.gate_up_proj_bias": (number, 2 * inner),
        f"{at}.experts.down_proj": (number, inner, hidden),
        f"{at}.experts.down_proj_bias": (number, hidden),
    }


def language_model(config: Config, lm_head: bool) -> Tensors:
    """A Llama, Qwen2, Qwen3 or gpt-oss; a tied one may still hold its lm_head."""
    size = (config["vocab_size"], config["hidden_size"])
    made = {"model.embed_tokens.weight": random("embed", *size) * 4}
    for number in range(config["num_hidden_layers"]):
        made |= layer(config, f"model.layers.{number}")
    made["model.norm.weight"] = random("norm", size[1])
    if lm_head:
        tied = config["tie_word_embeddings"]
        embed = made["model.embed_tokens.weight"]
        made["lm_head.weight"] = embed.clone() if tied else random("lm_head", *size)
    return made


def head(
    config: Config,
    num_taps: int,
    *,
    first: str = "layers.0",
    later: str = "layers.{}",
    mask_shape: tuple[int, ...] | None = None,
    embed: bool = True,
    target_hidden: int | None = None,
) -> Tensors:
    """An EAGLE-3 head, without `d2t`.

    Args:
        first: what its authors call layer 0.
        later: what they call the ones after it.
        mask_shape: of `mask_hidden`, if it drafts in parallel.
        embed: whether it has embeddings of its own.
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    fed = num_taps * (target_hidden or hidden)
    made = layer(config, first, is_first_of_head=True)
    for number in range(1, config["num_hidden_layers"]):
        made |= layer(config, later.format(number))
    made["fc.weight"] = random("fc", hidden, fed)
    made["norm.weight"] = random("norm", hidden)
    rows = config.get("draft_vocab_size") or vocab
    made["lm_head.weight"] = random("lm_head", rows, hidden)
    if embed:
        made["embed_tokens.weight"] = random("embed", vocab, hidden) * 4
    if mask_shape is not None:
        made["mask_hidden"] = random("mask_hidden", 1, fed).view(mask_shape)
    return made


def draft_vocabulary(vocab: int, rows: int, dtype: torch.dtype) -> Tensors:
    """`d2t`, offsets from draft ids to target ids, and `t2d`, which ids are used."""
    kept = torch.arange(rows) * vocab // rows
    used = torch.zeros(vocab, dtype=torch.bool)
    used[kept] = True
    return {"d2t": (kept - torch.arange(rows)).to(dtype), "t2d": used}


# Writing them.


def write_tensors(tensors: Tensors, folder: Path, files: str) -> None:
    """Into one file, or several, of the kind that `Published.files` names."""
    if files == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif files == "sharded":
        _save_shards(tensors, folder)
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _save_shards(tensors: Tensors, folder: Path) -> None:
    names = sorted(tensors)
    halves = names[::2], names[1::2]
    files = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05d}-of-{len(halves):05d}.safetensors"
        save_file({n: tensors[n] for n in half}, folder / file, {"format": "pt"})
        files |= dict.fromkeys(half, file)
    size = sum(w.nbytes for w in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
