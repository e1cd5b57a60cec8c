# SPDX-License-Identifier: Apache-2.0
"""The scheduler asks a live object for the draft length, and tells it the outcome."""

from types import SimpleNamespace

import pytest

from vllm._upstream.v1.core.sched import scheduler as base
from vllm.v1.core.sched.draft_load import ChosenLengths
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dynamic.draft_length import Load
from vllm.v1.spec_decode.metrics import SpecDecodingStats

TIMES = {256: {1: {0: 1.0, 3: 1.1}, 8: {0: 1.0, 3: 9.0}}}
DRAFTERS_LIMIT = 1000


@pytest.fixture
def make_scheduler(monkeypatch):
    """A scheduler of which the base has only set what these tests need."""

    def init(self, schedule, **spec) -> None:
        self.num_spec_tokens = 3
        self.log_stats = True
        self.dynamic_sd_lookup = [0, 1, 2]
        self.max_model_len, self.running = 4096, []
        spec |= {"method": "eagle3", "max_model_len": DRAFTERS_LIMIT}
        spec["num_speculative_tokens"] = self.num_spec_tokens
        spec["num_speculative_tokens_per_batch_size"] = schedule
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(**spec))

    monkeypatch.setattr(base.Scheduler.__mro__[1], "__init__", init)
    return Scheduler


def verify(scheduler, num_draft_tokens: int, num_accepted_tokens: int):
    """As the base's `update_from_output` does."""
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
    assert isinstance(lookup, ChosenLengths)
    assert (lookup[1], lookup[8]) == (3, 0)
    for _ in range(50):
        stats = verify(scheduler, 3, 0)
    assert isinstance(stats, SpecDecodingStats)  # the base's own count goes on
    assert stats.num_draft_tokens == 3
    assert lookup[1] == 0


def test_auto_without_times_drafts_as_far_as_it_may(make_scheduler):
    assert make_scheduler("auto").dynamic_sd_lookup[1] == 3


def test_a_schedule_is_left_alone(make_scheduler):
    scheduler = make_scheduler([(1, 1, 1), (2, 2, 2)])
    assert scheduler.dynamic_sd_lookup == [0, 1, 2]
    assert verify(scheduler, 3, 2).num_accepted_tokens == 2


def requests(*lengths: int) -> list[SimpleNamespace]:
    """With so many tokens each, of which the engine still waits for two."""
    return [
        SimpleNamespace(num_tokens=length - 2, num_output_placeholders=2)
        for length in lengths
    ]


def test_load_is_that_of_the_requests_that_run(make_scheduler):
    scheduler = make_scheduler("auto", pass_times=TIMES)
    lookup = scheduler.dynamic_sd_lookup
    assert lookup.load(3) == Load(3, 3, 0.0)  # none runs yet
    scheduler.running = requests(100, 200, DRAFTERS_LIMIT, 300)
    assert lookup.load(4) == Load(4, 3, 400.0)
    assert lookup.load(2) == Load(2, 2, 400.0)


@pytest.mark.parametrize("past, drafts", [(0, 3), (1, 0)])
def test_past_the_drafters_context_nothing_is_drafted(make_scheduler, past, drafts):
    """Defect: the longest drafts in every step, none of which was offered."""
    scheduler = make_scheduler("auto", pass_times=TIMES)
    scheduler.running = requests(DRAFTERS_LIMIT - 1 + past)
    assert [scheduler.dynamic_sd_lookup[1] for _ in range(20)] == [drafts] * 20
