# SPDX-License-Identifier: Apache-2.0
"""A drafter whose drafts are never accepted causes one warning, with numbers."""

from types import SimpleNamespace

import pytest

from vllm.v1.core.sched.step_drafts import MAX_REJECTED, RejectedDrafts

K = 4
SPEC = {"method": "draft_model", "model": "a/drafter"}


def make(**settings) -> RejectedDrafts:
    usual = {"rejection_sample_method": "block"}
    return RejectedDrafts(SimpleNamespace(**SPEC | usual | settings))


def observe(rejected: RejectedDrafts, times: int, accepted: int = 0) -> None:
    for _ in range(times):
        rejected.observe(K, accepted)


def test_one_warning_has_numbers(caplog_vllm):
    rejected = make()
    observe(rejected, MAX_REJECTED - 1)
    rejected.observe(0, 0)  # nothing was verified
    assert not caplog_vllm.records
    observe(rejected, 3 * MAX_REJECTED)
    (record,) = caplog_vllm.records
    said = f"last {MAX_REJECTED} drafts ({MAX_REJECTED * K} tokens) by a/drafter was"
    assert said in record.getMessage()


def test_one_accepted_token_is_enough(caplog_vllm):
    rejected = make()
    for _ in range(3):
        observe(rejected, MAX_REJECTED - 1)
        observe(rejected, 1, accepted=1)
    assert not caplog_vllm.records


@pytest.mark.parametrize(
    "settings", [{"method": "ngram"}, {"rejection_sample_method": "synthetic"}]
)
def test_other_methods_cause_none(caplog_vllm, settings: dict):
    for rejected in (make(**settings), RejectedDrafts(None)):
        observe(rejected, 2 * MAX_REJECTED)
    assert not caplog_vllm.records
