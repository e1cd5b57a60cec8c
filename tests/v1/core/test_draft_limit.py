# SPDX-License-Identifier: Apache-2.0
"""Which drafts are taken off where the drafter's context ends before the target's."""

from types import SimpleNamespace

import pytest

from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.draft_limit import cut_drafts_past_limit

CONTEXT, MAX_MODEL_LEN, K = 32, 64, 3
WITHIN, NEXT_TO, PAST = CONTEXT - 9, CONTEXT - 1, CONTEXT


def scheduler_of(
    tokens: list[int], context: int | None = CONTEXT, placeholders: int = 0
) -> SimpleNamespace:
    """Running requests of so many known tokens, each with K drafts."""
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
        # One within the context keeps the batch's query lengths equal.
        ([WITHIN, PAST], True),
        ([NEXT_TO, PAST + 20], True),
        ([PAST, PAST + 20], False),
        ([PAST], False),
    ],
)
def test_dropped_once_all_are_past(tokens: list[int], kept: bool, placeholders: int):
    scheduler = scheduler_of(tokens, placeholders=placeholders)
    cut_drafts_past_limit(scheduler)
    lengths = [len(request.spec_token_ids) for request in scheduler.running]
    assert lengths == [K if kept else 0] * len(tokens)


def test_a_request_without_drafts_does_not_keep_the_others():
    """A prompt that is being chunked is within the context, but has none."""
    scheduler = scheduler_of([WITHIN, PAST])
    scheduler.running[0].spec_token_ids = []
    cut_drafts_past_limit(scheduler)
    assert scheduler.running[1].spec_token_ids == []


@pytest.mark.parametrize("context", [None, MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
def test_a_drafter_that_reaches_as_far_keeps_all(context: int | None):
    scheduler = scheduler_of([MAX_MODEL_LEN - 1], context)
    cut_drafts_past_limit(scheduler)
    assert len(scheduler.running[0].spec_token_ids) == K


def test_drafts_without_a_drafter_are_left_alone():
    """Diffusion models schedule their canvas as drafts."""
    scheduler = scheduler_of([PAST])
    scheduler.vllm_config.speculative_config = None
    cut_drafts_past_limit(scheduler)
    assert scheduler.running[0].spec_token_ids == [-1] * K
