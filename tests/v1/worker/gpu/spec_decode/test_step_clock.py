# SPDX-License-Identifier: Apache-2.0
"""One step in many is timed, without waiting for the device."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode import step_clock
from vllm.v1.worker.gpu.spec_decode.step_clock import StepClock

EVERY = 4


class Device:
    """A fake GPU: recorded events complete when `run` is called, 1 ms apart."""

    def __init__(self) -> None:
        self.now, self.queue, self.records = 0, [], 0

    def run(self) -> None:
        for event in self.queue:
            self.now += 1
            event.done_at = self.now
        self.queue.clear()

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(done_at=None)
        event.query = lambda: event.done_at is not None
        event.elapsed_time = lambda later: later.done_at - event.done_at
        event.record = lambda: self.record(event)
        return event

    def record(self, event: SimpleNamespace) -> None:
        event.done_at = None
        self.records += 1
        self.queue.append(event)


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(step_clock, "TIMED_EVERY", EVERY)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def run_steps(clock: StepClock, number: int) -> list:
    found = []
    for _ in range(number):
        clock.begin()
        clock.sampled()
        found.append(clock.end())
    return found


def test_one_step_is_timed_at_a_time(device):
    clock = StepClock(torch.device("cuda"))
    assert set(run_steps(clock, 5 * EVERY)) == {None}
    assert device.records == 3
    device.run()
    assert run_steps(clock, 2) == [(0.001, 0.001), None]
    run_steps(clock, 2 * EVERY)
    assert device.records == 6


def test_step_after_one_without_end_is_timed(device):
    """A step without scheduled tokens returns before it samples."""
    clock = StepClock(torch.device("cuda"))
    run_steps(clock, EVERY - 1)
    clock.begin()
    device.run()
    run_steps(clock, 1)
    device.run()
    assert run_steps(clock, 1) == [(0.001, 0.001)]


def test_timed_steps_are_irregular():
    clock = StepClock(torch.device("cpu"))
    timed = [at for at, found in enumerate(run_steps(clock, 64 * EVERY)) if found]
    apart = {later - before for before, later in pairwise(timed)}
    every = step_clock.TIMED_EVERY
    assert len(apart) > 2 and every <= min(apart) and max(apart) < 2 * every


def test_cpu_measures_the_host(monkeypatch):
    monkeypatch.setattr(step_clock, "TIMED_EVERY", EVERY)
    seconds = iter([10.0, 10.5, 10.75])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(seconds))
    clock = StepClock(torch.device("cpu"))
    assert run_steps(clock, EVERY)[-1] == pytest.approx((0.5, 0.25))
