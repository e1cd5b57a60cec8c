# SPDX-License-Identifier: Apache-2.0
"""Which drafts are dropped if the drafter's context is shorter than the target's."""

from types import SimpleNamespace

import pytest

from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.excluded_drafts import cut_drafts_past_limit

CONTEXT, MAX_MODEL_LEN, K = 32, 64, 3
WITHIN, NEXT_TO, PAST = CONTEXT - 9, CONTEXT - 1, CONTEXT


def kept(requests: list[tuple[int, int]]) -> list[int]:
    """Drafts that requests keep, of known tokens and drafts of each; half of the known
    tokens are placeholders."""
    running = [
        SimpleNamespace(
            num_tokens=known - known // 2,
            num_output_placeholders=known // 2,
            spec_token_ids=[-1] * drafts,
        )
        for known, drafts in requests
    ]
    drafter = DrafterConfig("draft_model", K, context=CONTEXT)
    spec = SimpleNamespace(method="draft_model", drafter=drafter)
    config = SimpleNamespace(speculative_config=spec)
    scheduler = SimpleNamespace(
        vllm_config=config, running=running, max_model_len=MAX_MODEL_LEN
    )
    cut_drafts_past_limit(scheduler)
    return [len(request.spec_token_ids) for request in running]


@pytest.mark.parametrize(
    ("tokens", "is_kept"),
    [
        # As long as one request is within the context, all keep their drafts, so that
        # the batch's query lengths stay equal.
        ([WITHIN, PAST], True),
        ([NEXT_TO, PAST + 20], True),
        ([PAST, PAST + 20], False),
    ],
)
def test_drafts_are_dropped_once_all_requests_are_past_context(tokens, is_kept):
    assert kept([(known, K) for known in tokens]) == [K * is_kept] * 2
    # One in chunked prefill has no drafts.
    assert kept([(WITHIN, 0), (PAST, K)]) == [0, 0]
