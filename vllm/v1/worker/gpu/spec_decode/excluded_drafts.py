# SPDX-License-Identifier: Apache-2.0
"""Drafts of a step that are not accepted, whatever the target says.

They have rows like the others of their batch: a batch of equal query lengths has a FULL
CUDA graph. There are three kinds of them.

- Drafts that a grammar has invalidated, but the first. Its probability under the
  target is 0, so it is rejected. But it has to be rejected, not dropped: the token in
  its place is then sampled from the residual distribution. If it were dropped, that
  token would be sampled from the target's whole distribution, and tokens that the
  drafter prefers would be sampled too often.
- Drafts at positions past the drafter's context, which are placeholders.
- Drafts of requests with `disable_spec_decode`: output is what the target samples
  without drafts.
"""

from typing import TYPE_CHECKING

import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

if TYPE_CHECKING:
    from vllm.config.drafter import DrafterConfig
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


def excluded_drafts(
    sampler: "RejectionSampler",
    invalid: torch.Tensor | None,
    logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    input_batch: InputBatch,
) -> torch.Tensor | None:
    """Drafts not to verify.

    Args:
        invalid: [rows] bool, whether a grammar has invalidated the draft that led to a
            row; None if there is no grammar.
        logits: [rows, V], masked by grammars; those of a draft are in the row before.
        draft_logits: of probabilistic drafts; None for greedy ones.

    Returns:
        [rows] bool; None if all are verified.
    """
    # Synthetic acceptance might accept the first invalid one.
    is_synthetic = sampler.synthetic_conditional_rates is not None
    if draft_logits is not None and not is_synthetic:
        invalid = without_first_invalid(invalid, logits, input_batch)
    return with_past_context(sampler.drafter, invalid, input_batch)


def without_first_invalid(
    invalid: torch.Tensor | None, logits: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor | None:
    """`invalid` without each request's first one if its probability is 0."""
    if invalid is None:
        return None
    drafts = input_batch.input_ids[input_batch.logits_indices].long()
    # -1 stands for no draft, and is never verified.
    found = logits[:-1].gather(1, drafts[1:, None].clamp(min=0))[:, 0]
    firsts = invalid[1:] & ~invalid[:-1] & (found == -torch.inf) & (drafts[1:] >= 0)
    return torch.cat([invalid[:1], invalid[1:] & ~firsts])


def with_past_context(
    drafter: "DrafterConfig | None",
    invalid: torch.Tensor | None,
    input_batch: InputBatch,
) -> torch.Tensor | None:
    """`invalid`, and the drafts past the drafter's context."""
    if drafter is None or not reaches_past(drafter.context, input_batch):
        return invalid
    positions = input_batch.positions[input_batch.logits_indices]
    past = (positions >= drafter.context) & (input_batch.expanded_local_pos > 0)
    return past if invalid is None else invalid | past


def reaches_past(context: int | None, input_batch: InputBatch) -> bool:
    """Whether a request of the batch may be past the drafter's context; None: it has
    no limit of its own."""
    if context is None:
        return False
    ends = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs].numpy()
    return bool(ends.max(initial=0) > context)


def without_opted_out(
    sampler: "Sampler", drafts: torch.Tensor, input_batch: InputBatch
) -> torch.Tensor:
    """Drafts, with -1 in place of those of requests that have turned drafting off.

    Args:
        sampler: knows by request state which requests have.
        drafts: [rows], the token that led to each row; negative is never accepted.
        input_batch: the batch of these rows.
    """
    refuses = sampler.refuses_drafts
    if not refuses[input_batch.idx_mapping_np].any():
        return drafts
    by_state = async_tensor_h2d(refuses, device=drafts.device)
    opted_out = by_state[input_batch.expanded_idx_mapping]
    return drafts.masked_fill(opted_out & (input_batch.expanded_local_pos > 0), -1)
