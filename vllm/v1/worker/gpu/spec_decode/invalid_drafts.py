# SPDX-License-Identifier: Apache-2.0
"""Which of the drafts that a grammar took off is verified all the same.

The first one has no chance with the target, so it is rejected. But it has to
be: what then comes is drawn from what the drafter left of the target's chances. Without
a draft it would be drawn from all of them, and tokens that the drafter likes would come
out too often.
"""

import torch

from vllm.v1.worker.gpu.input_batch import InputBatch


def without_first_invalid(
    invalid: torch.Tensor | None, logits: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor | None:
    """Drafts that are not verified, less each request's first, if it has no chance.

    Not to be asked where acceptance is made up: what has no chance might be accepted.

    Args:
        invalid: [rows] bool, whether the draft that led to a row is not verified; None
            if all are.
        logits: [rows, V], masked by grammars; the row before a draft's is its own.

    Returns:
        [rows] bool, or None.
    """
    if invalid is None:
        return None
    drafts = input_batch.input_ids[input_batch.logits_indices].long()
    # -1 stands for no draft, and is never verified.
    found = logits[:-1].gather(1, drafts[1:, None].clamp(min=0))[:, 0]
    firsts = invalid[1:] & ~invalid[:-1] & (found == -torch.inf) & (drafts[1:] >= 0)
    return torch.cat([invalid[:1], invalid[1:] & ~firsts])
