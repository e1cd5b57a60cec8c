# SPDX-License-Identifier: Apache-2.0
"""The Gumbel noise that vLLM samples tokens with, in NumPy."""

import numpy as np
import torch

UINT = 0xFFFFFFFF  # of 32 bits


def noised(
    logits: torch.Tensor, temperature: float, seed: int, position: int
) -> np.ndarray:
    """[V] float64; the token with the largest value is sampled after `position`."""
    values = logits.double().cpu().numpy()
    if temperature == 0:
        return values
    return values / temperature + keyed_noise(seed, position, np.arange(len(values)))


def keyed_noise(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """[n] float64 noise: the token with the largest logit / temperature + noise wins.

    Gumbel noise of MurmurHash3 over four words: the seed's two, position (of the token
    before the sampled one) and token.
    """
    hashed = np.zeros(len(tokens), np.uint64)
    for word in (seed & UINT, seed >> 32 & UINT, position & UINT, tokens):
        mixed = np.asarray(word, np.uint64) * 0xCC9E2D51 & UINT
        hashed ^= _rotated(mixed, 15) * 0x1B873593 & UINT
        hashed = _rotated(hashed, 13) * 5 + 0xE6546B64 & UINT
    hashed ^= 4 * 4  # bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        hashed = (hashed ^ hashed >> shift) * factor & UINT
    uniform = (hashed + 0.5) / 2**32
    return -np.log(-np.log1p(-uniform))


def _rotated(words: np.ndarray, left: int) -> np.ndarray:
    return (words << left | words >> 32 - left) & UINT
