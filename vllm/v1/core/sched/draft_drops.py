# SPDX-License-Identifier: Apache-2.0
"""Drafts that are taken off before a step."""

from vllm.config.drafting import draft_limit, is_unified_method


def drop_drafts_past_limit(scheduler) -> None:
    """Takes off drafts at positions that the drafter's context does not reach."""
    if not is_unified_method(scheduler.vllm_config):
        return
    spec, longest = scheduler.vllm_config.speculative_config, scheduler.max_model_len
    limit = draft_limit(spec, longest)
    if limit >= longest:
        return
    for request in scheduler.running:
        known = request.num_tokens + request.num_output_placeholders
        room = max(0, limit - known)
        if len(request.spec_token_ids) > room:
            request.spec_token_ids = request.spec_token_ids[:room]
