# SPDX-License-Identifier: Apache-2.0
"""The first draft that a grammar has invalidated is verified all the same.

Its probability under the target is 0, so it is rejected. But it has to be rejected, not
dropped: the token in its place is then sampled from the residual distribution. If it
were dropped, that token would be sampled from the target's whole distribution, and
tokens that the drafter prefers would be sampled too often.
"""

import torch

from vllm.v1.worker.gpu.input_batch import InputBatch


def without_first_invalid(
    invalid: torch.Tensor | None, logits: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor | None:
    """Drafts not to verify, without each request's first one if its probability is 0.

    Not to be called with synthetic acceptance, which might accept that one.

    Args:
        invalid: [rows] bool, whether the draft that led to a row is not verified; None
            if all are.
        logits: [rows, V], masked by grammars; those of a draft are in the row before.

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
