# SPDX-License-Identifier: Apache-2.0
"""A drafter whose drafts are never accepted causes one warning, with numbers."""

from types import SimpleNamespace

import pytest

from vllm.v1.core.sched.step_drafts import MAX_REJECTED, RejectedDrafts

K = 4


def observe(times: int, *accepted: int, rounds: int = 1, **settings) -> None:
    """Reports so many drafts of which nothing is accepted, then others, in rounds."""
    usual = {"method": "draft_model", "rejection_sample_method": "block"}
    rejected = RejectedDrafts(SimpleNamespace(model="a/drafter", **usual | settings))
    for _ in range(rounds):
        for number in [0] * times + [*accepted]:
            rejected.observe(0, 0)  # nothing was verified
            rejected.observe(K, number)


def test_one_warning_has_numbers(caplog_vllm):
    observe(4 * MAX_REJECTED)
    (record,) = caplog_vllm.records
    assert f"last {MAX_REJECTED} drafts by a/drafter was" in record.getMessage()


@pytest.mark.parametrize(
    "settings", [{"method": "ngram"}, {"rejection_sample_method": "synthetic"}]
)
def test_an_accepted_token_is_enough_and_other_methods_cause_none(
    caplog_vllm, settings: dict
):
    observe(MAX_REJECTED - 1, 1, rounds=3)
    observe(2 * MAX_REJECTED, **settings)
    RejectedDrafts(None).observe(K, 0)
    assert not caplog_vllm.records
