# SPDX-License-Identifier: Apache-2.0
"""The scheduler asks a live object for the draft length, and tells it the outcome."""

from types import SimpleNamespace

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, auto_lengths
from vllm.v1.spec_decode.metrics import SpecDecodingStats

TIMES = {1: {0: 1.0, 3: 1.1}, 8: {0: 1.0, 3: 9.0}}


def lengths_of(schedule, **spec) -> DraftLengths | None:
    spec = {"pass_times": None, "num_speculative_tokens": 3} | spec
    spec |= {"num_speculative_tokens_per_batch_size": schedule}
    return auto_lengths(SimpleNamespace(**spec))


def verify(scheduler, num_draft_tokens: int, num_accepted_tokens: int):
    """As vLLM's `update_from_output` does."""
    return scheduler.make_spec_decoding_stats(
        None,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        num_invalid_spec_tokens=None,
        request_id="0",
    )


def scheduler_with(lengths: DraftLengths | None) -> Scheduler:
    """With what these tests need and no more."""
    scheduler = object.__new__(Scheduler)
    scheduler.num_spec_tokens, scheduler.log_stats = 3, True
    scheduler.draft_lengths = lengths
    return scheduler


def test_auto_follows_what_is_accepted():
    lengths = lengths_of("auto", pass_times=TIMES)
    assert (lengths[1], lengths[8]) == (3, 0)
    for _ in range(50):
        stats = verify(scheduler_with(lengths), 3, 0)
    assert isinstance(stats, SpecDecodingStats)  # vLLM's own count goes on
    assert stats.num_draft_tokens == 3
    assert lengths[1] == 0


def test_auto_without_times_drafts_as_far_as_it_may():
    assert lengths_of("auto")[1] == 3


def test_a_schedule_is_left_alone():
    assert lengths_of([(1, 1, 1), (2, 2, 2)]) is None
    assert verify(scheduler_with(None), 3, 2).num_accepted_tokens == 2
