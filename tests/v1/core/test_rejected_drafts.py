# SPDX-License-Identifier: Apache-2.0
"""A drafter whose drafts are never accepted causes one warning, with numbers."""

from types import SimpleNamespace

import pytest

from vllm.v1.core.sched.step_drafts import MAX_REJECTED, RejectedDrafts

K = 4


def observe(rejected: RejectedDrafts, times: int, accepted: int = 0) -> None:
    for _ in range(times):
        rejected.observe(K, accepted)


def test_one_warning_has_numbers(caplog_vllm):
    rejected = RejectedDrafts("a/drafter")
    observe(rejected, MAX_REJECTED - 1)
    assert not caplog_vllm.records
    observe(rejected, 3 * MAX_REJECTED)
    (record,) = caplog_vllm.records
    said = f"last {MAX_REJECTED} drafts ({MAX_REJECTED * K} tokens) by a/drafter was"
    assert said in record.getMessage()


def test_one_accepted_token_is_enough(caplog_vllm):
    rejected = RejectedDrafts("a/drafter")
    for _ in range(3):
        observe(rejected, MAX_REJECTED - 1)
        observe(rejected, 1, accepted=1)
    assert not caplog_vllm.records


@pytest.mark.parametrize(
    "settings, is_watched",
    [
        ({}, True),
        ({"method": "ngram"}, False),
        ({"rejection_sample_method": "synthetic"}, False),
    ],
)
def test_other_methods_are_not_watched(settings: dict, is_watched: bool):
    spec = {"method": "draft_model", "model": "a", "rejection_sample_method": "block"}
    spec = SimpleNamespace(**spec | settings)
    for found, expected in ((spec, is_watched), (None, False)):
        config = SimpleNamespace(speculative_config=found)
        watched = RejectedDrafts.of(SimpleNamespace(vllm_config=config))
        assert (watched is not None) == expected
