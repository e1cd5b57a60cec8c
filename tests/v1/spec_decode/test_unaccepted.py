# SPDX-License-Identifier: Apache-2.0
"""A drafter whose drafts are never accepted causes one warning, with numbers."""

from types import SimpleNamespace

import pytest

from vllm.v1.spec_decode.unaccepted import MAX_DRAFTS, UnacceptedDrafts

K = 4


def scheduler(method: str = "draft_model", **settings) -> SimpleNamespace:
    spec = {"method": method, "model": "a/drafter", "rejection_sample_method": "block"}
    spec = SimpleNamespace(**spec | settings)
    config = SimpleNamespace(speculative_config=spec)
    return SimpleNamespace(vllm_config=config)


def observe(watch: UnacceptedDrafts, times: int, accepted=0) -> bool:
    """Observes `times` drafts; whether all calls returned True (keep watching)."""
    return all([watch.observe(K, accepted) for _ in range(times)])


def test_warning_has_numbers(caplog_vllm):
    watch = UnacceptedDrafts.of(scheduler())
    assert observe(watch, MAX_DRAFTS - 1)
    assert not caplog_vllm.records
    assert not watch.observe(K, 0)
    (record,) = caplog_vllm.records
    said = f"{MAX_DRAFTS} drafts, {MAX_DRAFTS * K} tokens, was accepted: a/drafter"
    assert said in record.getMessage()


def test_one_accepted_token_is_enough(caplog_vllm):
    watch = UnacceptedDrafts.of(scheduler())
    for _ in range(3):
        assert observe(watch, MAX_DRAFTS - 1)
        assert observe(watch, 1, accepted=1)
    assert not caplog_vllm.records


@pytest.mark.parametrize(
    "settings", [{"method": "ngram"}, {"rejection_sample_method": "synthetic"}]
)
def test_other_methods_are_not_watched(settings: dict):
    assert UnacceptedDrafts.of(scheduler(**settings)) is None
    nothing = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None))
    assert UnacceptedDrafts.of(nothing) is None
