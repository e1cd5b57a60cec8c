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
    if drafter is None or drafter.context is None:
        return invalid
    ends = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
    if ends.max(initial=0) <= drafter.context:
        return invalid
    positions = input_batch.positions[input_batch.logits_indices]
    past = (positions >= drafter.context) & (input_batch.expanded_local_pos > 0)
    return past if invalid is None else invalid | past
