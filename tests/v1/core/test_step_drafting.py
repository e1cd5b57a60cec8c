# SPDX-License-Identifier: Apache-2.0
"""What a step says of its drafting, whether or not drafts were verified."""

from types import SimpleNamespace

import pytest

from vllm.config.drafter import DrafterConfig
from vllm.v1.spec_decode.step_metrics import StepDrafting, step_drafting

SPEC = SimpleNamespace(
    method="draft_model", drafter=DrafterConfig("draft_model", 3, is_parallel=True)
)


@pytest.mark.parametrize("seconds", [None, (0.2, 0.1)])
def test_step(seconds):
    found = drafting(SPEC, 8, seconds)
    assert found == StepDrafting("draft_model", "pard", 2, seconds)


def test_nothing_drafts():
    assert drafting(None, 8) is None


def test_nothing_ran():
    assert drafting(SPEC, 0) is None


def drafting(spec, num_tokens: int, seconds=None) -> StepDrafting | None:
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=num_tokens, num_spec_tokens_to_schedule=2
    )
    config = SimpleNamespace(speculative_config=spec)
    return step_drafting(config, scheduled, SimpleNamespace(step_seconds=seconds))
