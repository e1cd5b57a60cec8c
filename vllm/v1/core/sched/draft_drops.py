# SPDX-License-Identifier: Apache-2.0
"""Drafts that are taken off before a step, and one that must not be."""

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


def keep_first_misfits(scheduler, drafted) -> None:
    """Puts back, of the drafts that a grammar took off, each request's first.

    It cannot be accepted, and what replaces a draft that was drawn has to be drawn from
    what the drafter left of the target's chances. A placeholder stands for it: the
    drafts themselves are where they are verified, and grammars' masks go up to it.

    Args:
        drafted: DraftTokenIds, as the base's scheduler was given them.
    """
    spec = scheduler.vllm_config.speculative_config
    if not is_unified_method(scheduler.vllm_config):
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
