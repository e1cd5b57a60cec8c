# SPDX-License-Identifier: Apache-2.0
"""Where a drafter's context ends."""


def cut_drafts_past_limit(scheduler) -> None:
    """Takes off drafts at positions that the drafter's context does not reach."""
    spec, longest = scheduler.vllm_config.speculative_config, scheduler.max_model_len
    if spec is None:
        return
    limit = spec.drafter.limit(longest)
    if limit >= longest:
        return
    for request in scheduler.running:
        known = request.num_tokens + request.num_output_placeholders
        room = max(0, limit - known)
        if len(request.spec_token_ids) > room:
            request.spec_token_ids = request.spec_token_ids[:room]
