# SPDX-License-Identifier: Apache-2.0
"""Where a drafter's context ends."""

from typing import TYPE_CHECKING

from vllm.config.drafter import METHODS

if TYPE_CHECKING:
    from vllm.v1.request import Request


def are_within(limit: int, request: "Request", num_drafts: int) -> bool:
    """Whether a request's drafts were within the drafter's context.

    Past it they only keep the batch uniform, and are never accepted: that says nothing
    of drafts.

    Args:
        limit: first position that the drafter cannot draft.
        request: before it takes in what was accepted.
    """
    return request.num_tokens + num_drafts <= limit


def cut_drafts_past_limit(scheduler) -> None:
    """Takes drafts off once no running request is within the drafter's context.

    While one is, the others keep theirs: with equal query lengths the batch is served
    by FULL CUDA graphs. Drafts at positions past the context are not accepted: see
    `vllm/v1/worker/gpu/spec_decode/draft_limit.py`.
    """
    spec, longest = scheduler.vllm_config.speculative_config, scheduler.max_model_len
    if spec is None or spec.method not in METHODS:
        return
    limit = spec.drafter.limit(longest)
    if limit >= longest:
        return
    drafted = [request for request in scheduler.running if request.spec_token_ids]
    for request in drafted:
        if request.num_tokens + request.num_output_placeholders < limit:
            return
    for request in drafted:
        request.spec_token_ids = []
