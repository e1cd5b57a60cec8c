# SPDX-License-Identifier: Apache-2.0
"""Drafts of requests that want none.

They are verified like the others of their batch, since a batch of equal query lengths
has a CUDA graph, but never accepted: output is what the target samples without drafts.
"""

from typing import TYPE_CHECKING

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler


def without_unwanted(
    sampler: "Sampler", drafts: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor:
    """Drafts, with -1 in place of those that are not wanted.

    Args:
        sampler: knows by request state which requests want none.
        drafts: [rows], the token that led to each row; negative is never accepted.
        input_batch: the batch of these rows.
    """
    refuses = sampler.refuses_drafts
    if not refuses[input_batch.idx_mapping_np].any():
        return drafts
    by_state = async_tensor_h2d(refuses, device=drafts.device)
    unwanted = by_state[input_batch.expanded_idx_mapping]
    return drafts.masked_fill(unwanted & (input_batch.expanded_local_pos > 0), -1)
