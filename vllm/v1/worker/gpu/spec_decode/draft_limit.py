# SPDX-License-Identifier: Apache-2.0
"""Drafts at positions past the drafter's context are not accepted.

They are placeholders: a request past its drafter's context has as many rows as the
others, so that FULL CUDA graphs can run the batch.
"""

from typing import TYPE_CHECKING

import torch

from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    from vllm.config.drafter import DrafterConfig


def reaches_past(context: int | None, input_batch: InputBatch) -> bool:
    """Whether a request of the batch may be past the drafter's context; None: it has
    no limit of its own."""
    if context is None:
        return False
    ends = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
    return bool(ends.max(initial=0) > context)


def without_drafts_past_limit(
    drafter: "DrafterConfig | None",
    invalid: torch.Tensor | None,
    input_batch: InputBatch,
) -> torch.Tensor | None:
    """Drafts not to verify: `invalid`, and those past the drafter's context.

    Args:
        drafter: of the speculative config.
        invalid: [rows] bool, whether the draft that led to a row is not verified; None
            if all are.

    Returns:
        [rows] bool, or None.
    """
    if drafter is None or not reaches_past(drafter.context, input_batch):
        return invalid
    positions = input_batch.positions[input_batch.logits_indices]
    past = (positions >= drafter.context) & (input_batch.expanded_local_pos > 0)
    return past if invalid is None else invalid | past
