# SPDX-License-Identifier: Apache-2.0
"""The scheduler asks a live object for the draft length, and tells it the outcome."""

from types import SimpleNamespace

import pytest

from vllm._upstream.v1.core.sched import scheduler as base
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths
from vllm.v1.spec_decode.metrics import SpecDecodingStats

TIMES = {1: {0: 1.0, 3: 1.1}, 8: {0: 1.0, 3: 9.0}}


@pytest.fixture
def make_scheduler(monkeypatch):
    """A scheduler that has only what these tests need."""

    def init(self, schedule, **spec) -> None:
        self.num_spec_tokens = 3
        self.log_stats = True
        self.dynamic_sd_lookup = [0, 1, 2]
        spec["num_speculative_tokens"] = self.num_spec_tokens
        spec["num_speculative_tokens_per_batch_size"] = schedule
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(**spec))

    monkeypatch.setattr(base.Scheduler.__mro__[1], "__init__", init)
    return Scheduler


def verify(scheduler, num_draft_tokens: int, num_accepted_tokens: int):
    """As vLLM's `update_from_output` does."""
    return scheduler.make_spec_decoding_stats(
        None,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        num_invalid_spec_tokens=None,
        request_id="0",
    )


def test_auto_replaces_the_lookup(make_scheduler):
    scheduler = make_scheduler("auto", pass_times=TIMES)
    lookup = scheduler.dynamic_sd_lookup
    assert isinstance(lookup, DraftLengths)
    assert (lookup[1], lookup[8]) == (3, 0)
    for _ in range(50):
        stats = verify(scheduler, 3, 0)
    assert isinstance(stats, SpecDecodingStats)  # vLLM's own count goes on
    assert stats.num_draft_tokens == 3
    assert lookup[1] == 0


def test_auto_without_times_drafts_as_far_as_it_may(make_scheduler):
    assert make_scheduler("auto").dynamic_sd_lookup[1] == 3


def test_a_schedule_is_left_alone(make_scheduler):
    scheduler = make_scheduler([(1, 1, 1), (2, 2, 2)])
    assert scheduler.dynamic_sd_lookup == [0, 1, 2]
    assert verify(scheduler, 3, 2).num_accepted_tokens == 2
