# SPDX-License-Identifier: Apache-2.0
"""Where a drafter's context ends."""


def cut_drafts_past_limit(scheduler) -> None:
    """Takes drafts off once no running request is within the drafter's context.

    While one is, the others keep theirs: with equal query lengths the batch is served
    by FULL CUDA graphs. Drafts at positions past the context are not accepted: see
    `vllm/v1/worker/gpu/spec_decode/draft_limit.py`.
    """
    if not any(request.spec_token_ids for request in scheduler.running):
        return
    longest = scheduler.max_model_len
    limit = scheduler.vllm_config.speculative_config.drafter.limit(longest)
    if limit >= longest:
        return
    drafted = [request for request in scheduler.running if request.spec_token_ids]
    for request in drafted:
        if request.num_tokens + request.num_output_placeholders < limit:
            return
    for request in drafted:
        request.spec_token_ids = []
