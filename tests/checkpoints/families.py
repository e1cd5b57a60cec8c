# SPDX-License-Identifier: Apache-2.0
"""Drafters as they are published, shrunk: keys, names, dtypes and kinds of files.

Their config.json files are those of `published/`, and of `targets/` for what they were
trained for. Hidden sizes and vocabularies are small; what the families differ in is
kept: heads that do not divide the hidden size, layers' names, masks' shapes, missing
embeddings, vocabularies padded by 128 rows, keys in the style of older and newer
transformers. One target is gpt-oss: no width a power of two, and a window in every
second layer.
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
# TOKENS are the bundled tokenizer's, the rest of the rows is padding: so is the mask.
TOKENS, VOCAB = 2560, 2688
MASK = VOCAB - 10


@dataclass(frozen=True)
class Published:
    """One drafter as published, and what is to be made of it.

    Attributes:
        family: its row in `vllm.config.drafter.families.FAMILIES`.
        tensors: name to values, float32 where they are not integers.
        num_drafts, layers: what must be detected; layers None means the target's
            defaults.
        target: a file of `targets/`.
        dtype: of the tensors in the file.
        files: "safetensors", "bin", or "sharded" safetensors with an index.
        warp: what is in warp_model.bin, if there is one.
        settings: of the speculative config, beside the folder.
    """

    family: str
    tensors: Callable[[Config], Tensors]
    num_drafts: int
    layers: tuple[int, ...] | None = None
    target: str = "llama"
    dtype: torch.dtype = torch.bfloat16
    files: str = "safetensors"
    warp: Callable[[Config], Tensors] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

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
    """That of a PARD-2: how many of the target's states it is fed, and their width.

    They weigh about as much as the embeddings, and each layer's block of columns has
    weights of its own.
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
    d2t: torch.dtype | None = torch.int64,
    mask_dims: int = 0,
    **layout: Any,
) -> Callable[[Config], Tensors]:
    """What makes a head's tensors.

    Args:
        num_taps: layers of the target that it is fed.
        d2t: dtype of its table of ids; None: it has none.
        mask_dims: of `mask_hidden`; 0: it has none.
        layout: of its names, as `tensors.head` takes it.
    """

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


def _vicuna(config: Config) -> Tensors:
    return _midlayer(config | {"num_hidden_layers": 1})


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
    # PARD: a language model with two more keys. Tied, and yet with an lm_head of its
    # own in the file, as some are published.
    "pard-qwen3": _pard(
        partial(language_model, copies_lm_head=True),
        target="qwen3",
    ),
    # As Qwen2.5-0.5B for Qwen2.5-7B: 128 rows of padding fewer than the target.
    "pard-qwen2.5": _pard(language_model, target="qwen2", settings=_PROBABILISTIC),
    # Tensors in several files, and 128 rows of padding more than the target.
    "pard-llama": _pard(
        language_model, target="gpt-oss", files="sharded", settings=_PROBABILISTIC
    ),
    # PARD-2: beside such a model, a projection of the target's states.
    "pard2-qwen3": _pard2(
        warp=_projection(4, 128),
        layers=(8, 6, 4, 2),  # of nine states: the last one's after the norm
        target="qwen3",
    ),
    # Keys by the names they had at first, and the last layer alone.
    "pard2-llama-bias": _pard2(
        warp=_projection(1, 160, bias=True), layers=(8,), target="gpt-oss"
    ),
    # As it was once published: without the projection it is a PARD.
    "pard2-no-warp": _pard2(),
    # Heads: P-EAGLE. `midlayer`, then `layers.1` on.
    "peagle-amazon": _amazon(_head(mask_dims=3, first="midlayer"), target="gpt-oss"),
    # Its target has 128 rows of padding more.
    "peagle-amazon-reduced": _amazon(
        _head(d2t=torch.int32, mask_dims=2, first="midlayer"),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    "peagle-nemo": Published("P-EAGLE, NeMo", _nemo, 6),
    # verl-SpeCo has a name of its own for the model too.
    "peagle-verl-speco": _specforge(_head(mask_dims=3), 5),
    # The mask token alone could be a masked language model's; mask_hidden decides.
    "peagle-specforge": _specforge(
        _head(mask_dims=3, first="midlayer", embed=False), 7, (1, 3, 6)
    ),
    # Of speculators: the transformer's config is nested. As the ones converted from
    # SafeAILab's: no layer ids, and null for a size.
    "speculators-eagle3": _speculators3(_head(), 5, dtype=torch.float32),
    "speculators-eagle3-qwen3": _speculators3(_head(4), 3, (1, 3, 4, 7)),
    # RedHatAI's for gpt-oss: a norm before the projection, and a narrow MLP.
    "speculators-eagle3-input-norm": _speculators3(_head(), 3, target="gpt-oss"),
    "speculators-peagle-qwen3": _speculators(
        _head(d2t=None, mask_dims=3), 8, (2, 4, 6), target="qwen3"
    ),
    # Trained as EAGLE-3.1: a norm of each tapped layer, and normed states fed back.
    "speculators-peagle-fc-norm": _speculators(_head(4, mask_dims=3), 4, (1, 2, 5, 7)),
    # EAGLE-3 of SafeAILab (yuhuili), SpecForge and NVIDIA: most have no embeddings.
    # Its context is less than the target's: never binding.
    "eagle3-yuhuili": _safeailab(_midlayer, dtype=torch.float16),
    # SafeAILab's for Vicuna count the target's layers; there is but one.
    "eagle3-vicuna": _safeailab(_vicuna),
    "eagle3-angelslim": _nvidia(_midlayer, target="qwen3", files="bin"),
    # As for gpt-oss, at its true width.
    "eagle3-specforge": _nvidia(_midlayer, target="gpt-oss-wide", layers=(1, 2, 3)),
    # Layers by number, and ids of others than the target's defaults.
    "eagle3-nvidia": _nvidia(_head(d2t=None, embed=False), layers=(1, 4, 6)),
    # The whole vocabulary, no table of ids, null for the layers. Its target has 128
    # rows of padding more.
    "eagle3-nvidia-old": _nvidia(
        _head(d2t=None, first="midlayer", embed=False),
        target="qwen2",
        settings=_PROBABILISTIC,
    ),
    # Between the two: layers by number, but called midlayer.
    "eagle3-nvidia-midlayers": _nvidia(
        _head(first="midlayer.0", later="midlayer.{}", embed=False), layers=(2, 5, 7)
    ),
}


# Writing them.


def write_target(
    name: str, folder: Path, tokenizer: Path, has_weights: bool = True
) -> Path:
    """A target of random weights, with the tokenizer of the folder `tokenizer`."""
    config = json.loads((HERE / f"targets/{name}.json").read_text())
    tensors = language_model(config) if has_weights else {}
    if has_weights:
        tensors["lm_head.weight"][TOKENS:] = 0  # padding is never the likeliest
    write_checkpoint(folder, config, tensors)
    _copy_tokenizer(tokenizer, folder)
    return folder


def write_drafter(name: str, folder: Path, target: Path) -> Path:
    """The files of one of PUBLISHED; a language model gets the target's tokenizer."""
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
