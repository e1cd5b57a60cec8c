# SPDX-License-Identifier: Apache-2.0
"""Which drafts are dropped if the drafter's context is shorter than the target's."""

from types import SimpleNamespace

import pytest

from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.excluded_drafts import cut_drafts_past_limit

CONTEXT, MAX_MODEL_LEN, K = 32, 64, 3
WITHIN, NEXT_TO, PAST = CONTEXT - 9, CONTEXT - 1, CONTEXT


def scheduler_of(
    tokens: list[int], context: int | None = CONTEXT, placeholders: int = 0
) -> SimpleNamespace:
    """Running requests with these numbers of known tokens, and K drafts each."""
    running = [
        SimpleNamespace(
            num_tokens=known - placeholders,
            num_output_placeholders=placeholders,
            spec_token_ids=[-1] * K,
        )
        for known in tokens
    ]
    drafter = DrafterConfig("draft_model", K, context=context)
    spec = SimpleNamespace(method="draft_model", drafter=drafter)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=spec),
        max_model_len=MAX_MODEL_LEN,
        running=running,
    )


@pytest.mark.parametrize("placeholders", [0, 4])
@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([WITHIN, WITHIN], True),
        # One request is within the context: all keep their drafts, so that the
        # batch's query lengths stay equal.
        ([WITHIN, PAST], True),
        ([NEXT_TO, PAST + 20], True),
        ([PAST, PAST + 20], False),
        ([PAST], False),
    ],
)
def test_drafts_are_dropped_once_all_requests_are_past_context(
    tokens: list[int], kept: bool, placeholders: int
):
    scheduler = scheduler_of(tokens, placeholders=placeholders)
    cut_drafts_past_limit(scheduler)
    lengths = [len(request.spec_token_ids) for request in scheduler.running]
    assert lengths == [K if kept else 0] * len(tokens)


def test_request_without_drafts_does_not_keep_drafts_of_others():
    """A request in chunked prefill is within the context, but has no drafts."""
    scheduler = scheduler_of([WITHIN, PAST])
    scheduler.running[0].spec_token_ids = []
    cut_drafts_past_limit(scheduler)
    assert scheduler.running[1].spec_token_ids == []


@pytest.mark.parametrize("context", [None, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
def test_drafter_with_context_of_target_keeps_all_drafts(context: int | None):
    scheduler = scheduler_of([MAX_MODEL_LEN - 1], context)
    cut_drafts_past_limit(scheduler)
    assert len(scheduler.running[0].spec_token_ids) == K


def test_drafts_are_kept_without_drafter():
    """Diffusion models schedule their canvas as drafts."""
    scheduler = scheduler_of([PAST])
    scheduler.vllm_config.speculative_config = None
    cut_drafts_past_limit(scheduler)
    assert scheduler.running[0].spec_token_ids == [-1] * K
