# SPDX-License-Identifier: Apache-2.0
"""Keeps the first draft that a grammar invalidates, which must be verified.

`vllm/v1/worker/gpu/spec_decode/excluded_drafts.py` verifies it, and says why.
"""


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
