# SPDX-License-Identifier: Apache-2.0
"""Drafts that are not scheduled, or scheduled though a grammar forbids them.

Which of the scheduled ones are not accepted is up to the workers:
`vllm/v1/worker/gpu/spec_decode/verification.py`.
"""

from vllm.config.drafter import METHODS


def cut_drafts_past_limit(scheduler) -> None:
    """Drops all drafts once no running request is within the drafter's context.

    As long as one is, the others keep theirs, since FULL CUDA graphs need uniform query
    lengths.
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


def keep_first_invalid(scheduler, drafted) -> None:
    """Restores the first of each request's drafts that a grammar has dropped.

    It cannot be accepted, but the token that replaces a sampled draft has to be sampled
    from the residual distribution. A placeholder stands for it: workers have the drafts
    themselves, and grammar masks are computed up to it.

    Args:
        drafted: DraftTokenIds, as the scheduler received them.
    """
    spec = scheduler.vllm_config.speculative_config
    if spec is None or not spec.drafter.is_unified:
        return
    if spec.draft_sample_method != "probabilistic":
        return
    pairs = zip(drafted.req_ids, drafted.draft_token_ids, strict=True)
    for name, drafts in pairs:
        request = scheduler.requests.get(name)
        if request is None or request.is_finished() or request.is_prefill_chunk:
            continue
        kept = len(request.spec_token_ids)
        if request.use_structured_output and kept < len(drafts) and drafts[kept] >= 0:
            request.spec_token_ids = [*request.spec_token_ids, -1]
