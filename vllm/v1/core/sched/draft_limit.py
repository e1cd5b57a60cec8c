# SPDX-License-Identifier: Apache-2.0
"""Drafts past the end of the drafter's context."""

from vllm.config.drafter import METHODS


def cut_drafts_past_limit(scheduler) -> None:
    """Drops all drafts once no running request is within the drafter's context.

    As long as one is, the others keep theirs, since FULL CUDA graphs need uniform query
    lengths. Drafts at positions past the context are not accepted: see
    `vllm/v1/worker/gpu/spec_decode/excluded_drafts.py`.
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
