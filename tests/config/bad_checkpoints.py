# SPDX-License-Identifier: Apache-2.0
"""Drafters with broken files, or made for another target."""

from functools import partial
from pathlib import Path

import torch

from tests.checkpoints.quantized import quantize
from tests.checkpoints.words import save_words

from .bad_row import (
    CONFIG,
    GONE,
    WARP,
    WEIGHTS,
    Break,
    Row,
    config,
    edited_weights,
    rotated,
    saved,
    tensors,
    truncated,
)

NUM_TOKENS = 2560  # of the bundled models
PROJECTION = {"target_proj.weight": torch.zeros(192, 256)}
SAVED = saved(WARP, PROJECTION)


def moved(name: str) -> Break:
    """Moves config.json to a subfolder."""

    def apply(folder: Path) -> None:
        (folder / name).mkdir()
        (folder / CONFIG).rename(folder / name / CONFIG)

    return apply


def disjoint_vocabulary(folder: Path) -> None:
    """A vocabulary that shares only EOS with other models."""
    words = {f"alien {token}": token for token in range(1, NUM_TOKENS)}
    save_words({"<|eos|>": 0} | words, "<|eos|>", folder)


def quantized(name: str = "int8 W8A8"):
    return lambda folder: quantize(folder, name) and None


MODEL = '"model" of speculative_config: …'
UP = "layers.1.mlp.up_proj"
OTHER_WORDS = {"use_heterogeneous_vocab": True}
of_draft = partial(Row, drafter="draft")
of_peagle = partial(Row, drafter="peagle")

FILES = [
    Row(f"{MODEL} is a file", model=Path(WEIGHTS)),
    *(Row("nor was it found on the hub", model=name) for name in ("x" * 5000, "a\0b")),
    Row(f"{MODEL} has no config.json", moved("full")),
    # Vocabularies.
    of_draft("the target's own family", config(vocab_size=4096), rotated(300, 302)),
    of_draft("the target's own family", rotated(300, NUM_TOKENS)),
    of_draft("in common with the target", disjoint_vocabulary, **OTHER_WORDS),
    # PARD-2's projection.
    Row("holds more than tensors, …: download", SAVED, truncated(WARP, -1000)),
    Row("must hold target_proj.weight", saved(WARP, [1, 2])),
    Row(
        "must hold target_proj.weight",
        saved(WARP, PROJECTION | {"fc.weight": torch.zeros(2)}),
    ),
    Row("in …/config.json contradicts", SAVED, config(pard2_proj_bias=True)),
    *(
        Row("in …/config.json must be a finite", SAVED, config(pard2_scale=value))
        for value in (float("inf"), "large", True)
    ),
    Row("in …/config.json must be a finite", SAVED, config(pard2_target_dim=[256])),
    Row(
        "in …/config.json must be a list of int", SAVED, config(pard2_target_layers=-1)
    ),
    # Heads.
    Row(
        "d2t of … names all tokens",
        config(draft_vocab_size=NUM_TOKENS),
        tensors({"lm_head.weight": (NUM_TOKENS, 256)}),
        tensors({"d2t": torch.tensor([1, -1] + [0] * (NUM_TOKENS - 2))}),
        drafter="eagle3",
    ),
    of_peagle(
        "num_hidden_layers",
        edited_weights(lambda all: {n: all[n] for n in all if "layers.3." not in n}),
    ),
    # Quantized weights.
    of_peagle(
        "has quantized weights, but its config.json",
        quantized(),
        config(quantization_config=GONE),
    ),
    of_peagle(
        "has quantized weights, but no scale",
        quantized(),
        tensors({f"{UP}.weight_scale": GONE}),
    ),
    of_peagle("but no quantized weights", quantized(), tensors({f"{UP}.weight": GONE})),
    of_peagle("but no quantized weights", quantized(), tensors({f"{UP}.weight": (1,)})),
    Row(
        "has quantized weights, but no scale",
        quantized("GPTQ"),
        tensors({f"model.{UP}.scales": GONE}),
    ),
]
