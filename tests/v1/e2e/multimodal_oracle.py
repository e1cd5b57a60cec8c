# SPDX-License-Identifier: Apache-2.0
"""Oracles of multimodal targets, and of heads for them, in plain PyTorch."""

from itertools import cycle
from typing import Any

import torch
import torch.nn as nn
from PIL import Image
from transformers import BatchFeature

from .images import IMAGE, QWEN_PROCESSOR
from .multimodal_models import SECTIONS
from .oracle import EagleOracle, HeadOracle


class Seen:
    """A target with the images of a prompt, used like a language model by oracles.

    Args:
        target: a Qwen2.5-VL of transformers.
        images: in the order of their tokens.
    """

    def __init__(self, target: nn.Module, images: list[Image.Image]) -> None:
        self.target, self.config = target, target.config.get_text_config()
        self.seen = BatchFeature()
        if images:
            self.seen = QWEN_PROCESSOR(images=images, return_tensors="pt")
        self.get_input_embeddings = target.get_input_embeddings
        self.get_output_embeddings = target.get_output_embeddings

    def __call__(self, tokens: torch.Tensor, **given: Any) -> Any:
        given |= dict(self.seen)
        if self.seen:
            given["mm_token_type_ids"] = (tokens == IMAGE).int()
        return self.target(tokens, **given)

    def embeddings(self) -> torch.Tensor:
        """[cells, H], of all images."""
        found = self.target.model.get_image_features(**self.seen).pooler_output
        return torch.cat([rows.view(-1, rows.shape[-1]) for rows in found])


def places(tokens: list[int], sides: list[tuple[int, int]]) -> torch.Tensor:
    """[3, n], M-RoPE positions of time, height and width.

    A cell of an image has its row and column, plus the position at which the image
    begins. Text continues after the largest position so far (Qwen2-VL,
    arXiv:2409.12191).
    """
    left, found, at = iter(sides), [], 0
    rest = iter(range(len(tokens)))
    for number in rest:
        if tokens[number] != IMAGE:
            found.append((at, at, at))
            at += 1
            continue
        rows, columns = next(left)
        found += [(at, at + r, at + c) for r in range(rows) for c in range(columns)]
        at += max(rows, columns)
        for _ in range(rows * columns - 1):
            next(rest)
    return torch.tensor(found).T


class MRopeHeadOracle(HeadOracle):
    """An EAGLE-3 head that was trained on M-RoPE positions.

    Args:
        sides: of the images of a prompt, rows and columns of cells.
    """

    def __init__(self, *args: Any, sides: list[tuple[int, int]]) -> None:
        super().__init__(*args)
        self.sides, self.plain, self.rope = sides, self.rope, self._mrope

    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        behind = [0] * count  # drafts and masks have positions of text
        self.places = places(known + behind, self.sides)[:, None]
        return super().drafts(known, count, width)

    def _mrope(
        self, hidden: torch.Tensor, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """[1, n, head_dim] twice, cosines and sines of n rows.

        Each section of the frequencies uses one of the three positions.
        """
        of_dims = [self.plain(hidden, at) for at in self.places[..., : len(hidden)]]
        sections = [part.split(2 * SECTIONS, -1) for pair in of_dims for part in pair]
        cosines, sines = sections[::2], sections[1::2]
        return tuple(
            torch.cat([parts[d][i] for i, d in zip(range(6), cycle(range(3)))], dim=-1)
            for parts in (cosines, sines)
        )


class SeeingEagleOracle(EagleOracle):
    """An EAGLE head like Mistral's: with norms, and fed embeddings of images."""

    def _embeddings(self, tokens: list[int]) -> torch.Tensor:
        found = super()._embeddings(tokens).clone()
        is_image = torch.tensor(tokens) == IMAGE
        if is_image.any():
            found[is_image] = self.target.embeddings()
        return found

    def _forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([self._embeddings(tokens), hidden], dim=-1)
        mixed = self._linear(mixed, "fc")
        normed = self._norm(mixed, "layers.0.input_layernorm")
        return self._norm(self._layer(0, mixed, normed), "norm")
