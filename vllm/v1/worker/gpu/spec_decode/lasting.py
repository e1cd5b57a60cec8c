# SPDX-License-Identifier: Apache-2.0
"""Keeps tensors while an engine sleeps.

Sleep of level 2 discards memory that was allocated while weights were loaded; when the
engine wakes up it has any contents. What is allocated while the KV cache is initialized
is kept at every level, except for the cache itself.
"""

import torch


def outlast_weights(owner: object) -> None:
    """Allocates memory anew for an object's tensors, which remain the same tensors.

    To be called while the KV cache is initialized, before CUDA graphs are captured.
    """
    for tensor in vars(owner).values():
        if isinstance(tensor, torch.Tensor):
            tensor.data = tensor.clone()
