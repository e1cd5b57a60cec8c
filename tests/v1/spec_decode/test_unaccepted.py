# SPDX-License-Identifier: Apache-2.0
"""A drafter whose drafts are never accepted causes one warning, with numbers."""

from types import SimpleNamespace

import pytest

from vllm import SamplingParams
from vllm.config.drafter import DrafterConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.unaccepted import MAX_DRAFTS, UnacceptedDrafts

K, LIMIT = 4, 64
REQUEST = SimpleNamespace(num_tokens=10, sampling_params=SamplingParams())


def scheduler(method: str = "draft_model", **settings) -> SimpleNamespace:
    spec = {"method": method, "model": "a/drafter", "rejection_sample_method": "block"}
    spec["drafter"] = DrafterConfig(method, K, context=LIMIT)
    spec = SimpleNamespace(**spec | settings)
    config = SimpleNamespace(speculative_config=spec)
    return SimpleNamespace(vllm_config=config, max_model_len=2048)


def observe(watch: UnacceptedDrafts, times: int, accepted=0, request=REQUEST) -> bool:
    """Observes `times` drafts; whether all calls returned True (keep watching)."""
    return all([watch.observe(K, accepted, request) for _ in range(times)])


def test_warning_has_numbers(caplog_vllm):
    watch = UnacceptedDrafts.of(scheduler())
    assert observe(watch, MAX_DRAFTS - 1)
    assert not caplog_vllm.records
    assert not watch.observe(K, 0, REQUEST)
    (record,) = caplog_vllm.records
    said = f"{MAX_DRAFTS} drafts, {MAX_DRAFTS * K} tokens, was accepted: a/drafter"
    assert said in record.getMessage()


def test_one_accepted_token_is_enough(caplog_vllm):
    watch = UnacceptedDrafts.of(scheduler())
    for _ in range(3):
        assert observe(watch, MAX_DRAFTS - 1)
        assert observe(watch, 1, accepted=1)
    assert not caplog_vllm.records


def test_drafts_past_drafter_context_do_not_count(caplog_vllm):
    watch = UnacceptedDrafts.of(scheduler())
    past = SimpleNamespace(num_tokens=LIMIT - K)
    assert observe(watch, MAX_DRAFTS, request=past)
    assert not caplog_vllm.records


@pytest.mark.parametrize(
    "settings", [{"method": "ngram"}, {"rejection_sample_method": "synthetic"}]
)
def test_other_methods_are_not_watched(settings: dict):
    assert UnacceptedDrafts.of(scheduler(**settings)) is None
    nothing = SimpleNamespace(vllm_config=SimpleNamespace(speculative_config=None))
    assert UnacceptedDrafts.of(nothing) is None


def counting(**watches) -> SimpleNamespace:
    """A scheduler with only what it needs to count drafts."""
    none = {"unaccepted_drafts": None, "acceptance_watch": None, "draft_lengths": None}
    return SimpleNamespace(**none | watches, requests={"a": REQUEST}, log_stats=False)


def test_scheduler_counts_and_stops(caplog_vllm):
    """Even without stats; steps without drafts do not count."""
    made = counting(unaccepted_drafts=UnacceptedDrafts.of(scheduler()))
    for drafted in [K, 0] * (MAX_DRAFTS + 1):
        Scheduler.make_spec_decoding_stats(made, None, drafted, 0, None, "a")
    assert len(caplog_vllm.records) == 1 and made.unaccepted_drafts is None


@pytest.mark.parametrize("watch", ["unaccepted_drafts", "acceptance_watch"])
def test_drafts_that_were_not_verified_do_not_count(watch: str):
    """Regression: acceptance seemed to fall when only a part of the drafts was
    verified."""
    seen = []
    made = counting(
        **{watch: SimpleNamespace(observe=lambda *given: seen.append(given[:2]) or 1)}
    )
    for invalid in (None, {}, {"a": 1}, {"a": K}, {"b": K}):
        Scheduler.make_spec_decoding_stats(made, None, K, 1, invalid, "a")
    assert seen == [(K, 1), (K, 1), (K - 1, 1), (K, 1)]
