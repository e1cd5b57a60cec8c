# SPDX-License-Identifier: Apache-2.0
"""The one draft that a grammar takes off and a step must verify all the same.

Why stands in `vllm/v1/worker/gpu/spec_decode/invalid_drafts.py`, which verifies it.
"""


def keep_first_invalid(scheduler, drafted) -> None:
    """Puts back, of the drafts that a grammar took off, each request's first.

    It cannot be accepted, and what replaces a draft that was drawn has to be drawn from
    what the drafter left of the target's chances. A placeholder stands for it: the
    drafts themselves are where they are verified, and grammars' masks go up to it.

    Args:
        drafted: DraftTokenIds, as the scheduler was given them.
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
