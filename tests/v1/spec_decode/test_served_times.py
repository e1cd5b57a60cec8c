# SPDX-License-Identifier: Apache-2.0
"""Wrongly measured step times are corrected by the times of steps while serving."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm.v1.core.sched import step_intervals
from vllm.v1.core.sched.step_intervals import StepIntervals
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths
from vllm.v1.spec_decode.dynamic.pass_times import CONTEXT
from vllm.v1.spec_decode.dynamic.served_times import (
    HALF_LIFE,
    TRIMMED,
    ServedTimes,
)

from .test_draft_length import CURVES, Simulation, best_fixed, measured, parallel_ms

MEASURED = {0: 1.0, 3: 2.0, 7: 4.0}


def served(ratios: dict[int, float], num_steps: int = 20, num_reqs: int = 8):
    times = ServedTimes()
    for plan, ratio in ratios.items():
        for _ in range(num_steps):
            times.observe(num_reqs, plan, ratio)
    return times


def test_single_plan_changes_nothing():
    assert served({3: 2.0}).correct(8, MEASURED) == MEASURED
    assert served({3: 2.0, 7: 1.0}, num_steps=2).correct(8, MEASURED) == MEASURED


def test_corrected_times_keep_served_ratios():
    found = served({3: 0.5, 7: 1.0}).correct(8, MEASURED)
    assert found[7] / found[3] == pytest.approx(4.0, rel=0.02)
    # Plan 0, which was not served, is scaled by the mean of both.
    assert found[3] < 2.0 * found[0] and found[7] > 4.0 * found[0]


def test_times_of_trimmed_steps_do_not_correct_other_steps():
    times = served({TRIMMED: 2.0})
    assert times.longer(8)(TRIMMED) == 1.0  # nothing to compare it with
    times = served({TRIMMED: 2.0, 3: 1.1})
    assert times.longer(8)(TRIMMED) == pytest.approx(2.0, rel=0.01)
    assert times.longer(8)(7) == pytest.approx(1.1, rel=0.01)


def test_times_of_steps_without_drafts_do_not_correct_others():
    times = served({0: 1.4, 3: 1.1})
    assert times.longer(8)(0) == pytest.approx(1.4, rel=0.01)
    assert times.longer(8)(7) == pytest.approx(1.1, rel=0.01)
    assert times.longer(8)(TRIMMED) == pytest.approx(1.1, rel=0.01)


def test_batch_sizes_are_corrected_separately():
    times = served({3: 0.5, 7: 1.0}, num_reqs=8)
    assert times.correct(9, MEASURED) != MEASURED
    assert times.correct(16, MEASURED) == MEASURED


def test_pauses_are_ignored():
    times = served({3: 1.0, 7: 1.0})
    for _ in range(3):
        times.observe(8, 7, 50.0)
    assert times.correct(8, MEASURED) == MEASURED


def test_old_times_count_less():
    times = served({3: 0.5, 7: 1.0})
    for _ in range(6 * HALF_LIFE):
        times.observe(8, 7, 1.0)
    assert times.correct(8, MEASURED)[3] == pytest.approx(2.0, rel=0.05)


class Noisy(Simulation):
    """An engine whose step times were measured on a busy machine.

    Attributes:
        tells: whether the times of served steps are reported.
    """

    def __init__(self, num_drafts: int, seed: int, tells: bool):
        super().__init__(parallel_ms, num_drafts, seed)
        rng = np.random.default_rng(seed)
        noisy = {
            n: {k: seconds * rng.uniform(1.0, 1.25) for k, seconds in row.items()}
            for n, row in measured(parallel_ms, num_drafts)[CONTEXT].items()
        }
        self.lengths = DraftLengths(num_drafts, {CONTEXT: noisy})
        self.tells, self.last = tells, -1

    def verify(self, n: int, drafted: int, rates: list[float]):
        if self.tells and self.last == drafted == self.drafted:
            seconds = parallel_ms(n, drafted) / 1e3
            self.lengths.observe_seconds(n, CONTEXT, drafted, seconds)
        self.last = drafted
        return super().verify(n, drafted, rates)


def test_finds_best_plan_despite_wrong_measurements():
    rates, found = CURVES["published"](7), {False: [], True: []}
    for n, seed, tells in ((n, s, t) for n in (1, 8) for s in range(4) for t in found):
        simulation = Noisy(7, seed, tells)
        simulation.run(n, rates, 8_000)
        worth = simulation.run(n, rates, 2_000) / best_fixed(parallel_ms, n, rates)
        found[tells].append(worth)
    assert min(found[False]) < 0.97  # otherwise the test shows nothing
    assert min(found[True]) > 0.98


def decode(num_reqs: int, num_drafts: int, **more) -> SimpleNamespace:
    step = {
        "num_scheduled_tokens": dict.fromkeys(range(num_reqs), num_drafts + 1),
        "total_num_scheduled_tokens": num_reqs * (num_drafts + 1),
        "num_spec_tokens_to_schedule": num_drafts,
        "scheduled_new_reqs": [],
        "verify_budget": None,
    }
    return SimpleNamespace(**step | more)


def test_intervals_are_between_equal_steps(monkeypatch):
    now = iter(range(100))
    monkeypatch.setattr(step_intervals.time, "perf_counter", lambda: next(now))
    intervals = StepIntervals()
    assert intervals.end(decode(4, 3)) is None
    assert intervals.end(decode(4, 3)) == ((4, 3, False), 1)
    for other in (
        decode(5, 3),
        decode(4, 3),
        decode(4, 3, scheduled_new_reqs=["prompt"]),
        decode(4, 3),
        decode(4, 3, verify_budget=9),
        decode(4, 3),
        decode(4, 3, num_spec_tokens_to_schedule=5),  # drafts more than it verifies
        decode(0, 0),
        decode(0, 0),
        decode(4, 3),
    ):
        assert intervals.end(other) is None
    assert intervals.end(decode(4, 3)) == ((4, 3, False), 1)
    assert intervals.end(decode(4, 3, verify_budget=9)) is None
    assert intervals.end(decode(4, 3, verify_budget=8)) == ((4, 3, True), 1)
