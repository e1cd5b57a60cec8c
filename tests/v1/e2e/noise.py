# SPDX-License-Identifier: Apache-2.0
"""The Gumbel noise that vLLM samples tokens with, in NumPy."""

import numpy as np
import torch

from vllm.v1.worker.gpu.spec_decode.noise import keyed_noise


def noised(
    logits: torch.Tensor, temperature: float, seed: int, position: int
) -> np.ndarray:
    """[V] float64; the token with the largest value is sampled after `position`."""
    values = logits.double().cpu().numpy()
    if temperature == 0:
        return values
    return values / temperature + keyed_noise(seed, position, np.arange(len(values)))
