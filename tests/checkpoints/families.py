# SPDX-License-Identifier: Apache-2.0
"""Published drafters, scaled down: same config keys, tensor names, dtypes and files.

Their config.json files are in `published/`, those of their targets in `targets/`.
Hidden sizes and vocabularies are small; differences between families are kept: a
head_dim other than hidden_size / num_attention_heads, layer names, shapes of
mask_hidden, missing embeddings, vocabularies padded by 128 rows, config keys of older
and newer transformers. One target is gpt-oss: its hidden size is not a power of two,
and every second layer has a sliding window.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .tensors import (
    Config,
    Tensors,
    draft_vocabulary,
    head,
    language_model,
    random,
    write_checkpoint,
)

HERE = Path(__file__).parent
# The bundled tokenizer has TOKENS tokens; the mask token is one of the padding rows.
TOKENS, VOCAB = 2560, 2688
MASK = VOCAB - 10


@dataclass(frozen=True)
class Published:
    """A published drafter, and how it must be detected."""

    family: str  # in `vllm.config.drafter.FAMILIES`
    tensors: Callable[[Config], Tensors]  # makes them, float32 or integers
    num_drafts: int
    layers: tuple[int, ...] | None = None  # None: the target's defaults
    target: str = "llama"  # a file in `targets/`
    dtype: torch.dtype = torch.bfloat16  # of floating-point tensors in the file
    files: str = "safetensors"  # or "bin", or "sharded" safetensors with an index
    warp: Callable[[Config], Tensors] | None = None  # makes those of warp_model.bin
    settings: Mapping[str, Any] = field(default_factory=dict)  # beside the model

    @property
    def method(self) -> str:
        return "draft_model" if self.family.startswith("PARD") else "eagle3"

    @property
    def width(self) -> int:
        """Tokens per pass."""
        return 1 if self.family.startswith("EAGLE") else self.num_drafts

    @property
    def mask(self) -> int | None:
        return MASK if self.width > 1 else None


def _projection(
    num_layers: int, width: int, bias: bool = False
) -> Callable[[Config], Tensors]:
    """Makes the projection of a PARD-2 from so many hidden states of a target.

    Projected states are about as large as the embeddings, and the columns of each layer
    have different weights.
    """

    def make(config: Config) -> Tensors:
        rows, scale = config["hidden_size"], 0.02
        blocks = [
            random(f"target_proj.{i}", rows, width) / 4 / scale
            for i in range(num_layers)
        ]
        made = {"target_proj.weight": torch.cat(blocks, dim=1)}
        if bias:
            made["target_proj.bias"] = random("target_proj.bias", rows) / scale
        return made

    return make


def _head(
    num_taps: int = 3,
    d2t: torch.dtype | None = torch.int64,  # None: it has none
    mask_dims: int = 0,  # of `mask_hidden`; 0: it has none
    **layout: Any,
) -> Callable[[Config], Tensors]:
    """Makes the tensors of a head; `layout` is for `tensors.head`."""

    def make(config: Config) -> Tensors:
        shape = config | config.get("transformer_layer_config", {})
        hidden = shape["hidden_size"]
        fed = num_taps * hidden
        made = head(shape, num_taps, **layout)
        if mask_dims:
            lead = [1] * (mask_dims - 1)
            made["mask_hidden"] = random("mask_hidden", 1, fed).view(*lead, fed)
        if config.get("norm_before_fc"):
            made["input_norm.weight"] = random("input_norm", fed)
        for i in range(num_taps if config.get("fc_norm") else 0):
            made[f"fc_norm.{i}.weight"] = random(f"fc_norm.{i}", hidden)
        if d2t is not None:
            made |= draft_vocabulary(VOCAB, config["draft_vocab_size"], d2t)
        return made

    return make


def _nemo(config: Config) -> Tensors:
    tops = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    made = _head(mask_dims=3)(config)
    return {n if n in tops else f"model.{n}": w for n, w in made.items()}


_PROBABILISTIC = {"draft_sample_method": "probabilistic"}
_midlayer = _head(first="midlayer", embed=False)
_pard = partial(Published, "PARD", num_drafts=8)
_pard2 = partial(Published, "PARD-2", language_model, 15)
_amazon = partial(Published, "P-EAGLE, Amazon", num_drafts=7)
_specforge = partial(Published, "P-EAGLE, SpecForge or verl-SpeCo")
_speculators3 = partial(Published, "EAGLE-3, speculators")
_speculators = partial(Published, "P-EAGLE, speculators")
_safeailab = partial(Published, "EAGLE-3, SafeAILab", num_drafts=7, files="bin")
_nvidia = partial(Published, "EAGLE-3, SpecForge or NVIDIA", num_drafts=7)
PUBLISHED: dict[str, Published] = {
    # PARD: a language model with two more config keys. Its embeddings are tied, yet the
    # file has an lm_head too, as some published files do.
    "pard-qwen3": _pard(partial(language_model, copies_lm_head=True), target="qwen3"),
    # Like Qwen2.5-0.5B for Qwen2.5-7B: 128 padding rows fewer than the target.
    "pard-qwen2.5": _pard(language_model, target="qwen2", settings=_PROBABILISTIC),
    # Sharded, and with 128 padding rows more than the target.
    "pard-llama": _pard(
        language_model, target="gpt-oss", files="sharded", settings=_PROBABILISTIC
    ),
    # PARD-2: such a model, and a projection of the target's hidden states.
    "pard2-qwen3": _pard2(
        warp=_projection(4, 128),
        layers=(8, 6, 4, 2),  # of nine states: the last one is after the final norm
        target="qwen3",
    ),
    # With the original names of its config keys, and the last layer only.
    "pard2-llama-bias": _pard2(
        warp=_projection(1, 160, bias=True), layers=(8,), target="gpt-oss"
    ),
    # As once published, without the projection: it drafts like a PARD.
    "pard2-no-warp": _pard2(),
    # P-EAGLE heads. Layers are called `midlayer`, `layers.1`, and so on.
    "peagle-amazon": _amazon(_head(mask_dims=3, first="midlayer"), target="gpt-oss"),
    # Its target has 128 more padding rows.
    "peagle-amazon-reduced": _amazon(
        _head(d2t=torch.int32, mask_dims=2, first="midlayer"),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    "peagle-nemo": Published("P-EAGLE, NeMo", _nemo, 6),
    # verl-SpeCo has its own model_type too.
    "peagle-verl-speco": _specforge(_head(mask_dims=3), 5),
    # A mask token alone could mean a masked language model; mask_hidden decides.
    "peagle-specforge": _specforge(
        _head(mask_dims=3, first="midlayer", embed=False), 7, (1, 3, 6)
    ),
    # speculators format: the transformer's config is nested. Like heads converted from
    # SafeAILab's: no layer ids, and null for a size.
    "speculators-eagle3": _speculators3(_head(), 5, dtype=torch.float32),
    "speculators-eagle3-qwen3": _speculators3(_head(4), 3, (1, 3, 4, 7)),
    # RedHatAI's for gpt-oss: a norm before `fc`, and a narrow MLP.
    "speculators-eagle3-input-norm": _speculators3(_head(), 3, target="gpt-oss"),
    "speculators-peagle-qwen3": _speculators(
        _head(d2t=None, mask_dims=3), 8, (2, 4, 6), target="qwen3"
    ),
    # EAGLE-3.1: a norm for each tapped layer, and normalized states are fed back.
    "speculators-peagle-fc-norm": _speculators(_head(4, mask_dims=3), 4, (7, 1, 5, 2)),
    # EAGLE-3 of SafeAILab (yuhuili), SpecForge and NVIDIA: most have no embeddings.
    # Its context is shorter than the target's, which does not limit drafting.
    "eagle3-yuhuili": _safeailab(_midlayer, dtype=torch.float16),
    # SafeAILab's for Vicuna: num_hidden_layers is the target's; the head has one layer.
    "eagle3-vicuna": _safeailab(lambda c: _midlayer(c | {"num_hidden_layers": 1})),
    "eagle3-angelslim": _nvidia(_midlayer, target="qwen3", files="bin"),
    # Like those for gpt-oss, at its real hidden size.
    "eagle3-specforge": _nvidia(_midlayer, target="gpt-oss-wide", layers=(1, 2, 3)),
    # Numbered layer names, and tapped layers other than the target's defaults: the
    # embeddings among them, in another order than the target returns them.
    "eagle3-nvidia": _nvidia(_head(d2t=None, embed=False), layers=(6, 0, 4)),
    # Full vocabulary, no `d2t`, null for the layer ids. Its target has 128 more padding
    # rows.
    "eagle3-nvidia-old": _nvidia(
        _head(d2t=None, first="midlayer", embed=False),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    # Between the two: numbered layer names, but `midlayer`.
    "eagle3-nvidia-midlayers": _nvidia(
        _head(first="midlayer.0", later="midlayer.{}", embed=False), layers=(2, 5, 7)
    ),
}


# Writing checkpoints.


def write_target(
    name: str, folder: Path, tokenizer: Path, has_weights: bool = True
) -> Path:
    """Writes a target with random weights and the tokenizer in folder `tokenizer`."""
    config = json.loads((HERE / f"targets/{name}.json").read_text())
    tensors = language_model(config) if has_weights else {}
    if has_weights:
        tensors["lm_head.weight"][TOKENS:] = 0  # padding is never the argmax
    write_checkpoint(folder, config, tensors)
    _copy_tokenizer(tokenizer, folder)
    return folder


def write_drafter(name: str, folder: Path, target: Path) -> Path:
    """Writes a drafter of PUBLISHED; a language model gets the target's tokenizer."""
    drafter = PUBLISHED[name]
    config = json.loads((HERE / f"published/{name}.json").read_text())
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    tensors = _stored(drafter.tensors(config), drafter.dtype)
    write_checkpoint(folder, config, tensors, drafter.files)
    if drafter.warp is not None:
        warp = _stored(drafter.warp(config), drafter.dtype)
        torch.save(warp, folder / "warp_model.bin")
    if drafter.method == "draft_model":
        _copy_tokenizer(target, folder)
    return folder


def _stored(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: w.to(dtype) if w.is_floating_point() else w for n, w in tensors.items()}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / file, folder / file)
