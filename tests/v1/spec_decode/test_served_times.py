# SPDX-License-Identifier: Apache-2.0
"""Wrongly measured step times are corrected by the times of steps while serving."""

from math import exp, log
from types import SimpleNamespace

import numpy as np
import pytest

from vllm.v1.core.sched import step_intervals
from vllm.v1.core.sched.step_intervals import StepIntervals
from vllm.v1.spec_decode.dynamic.served_times import (
    HALF_LIFE,
    TRIMMED,
    ServedTimes,
)

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
    times = ServedTimes()
    for _ in range(4):
        for plan, ratio in ((3, 0.8), (7, 1.0)):
            for _ in range(10):
                times.observe(8, plan, ratio)
    found = times.correct(8, MEASURED)
    assert found[7] / found[3] == pytest.approx(2.5, rel=0.02)
    # Plan 0, which was not served, is scaled by the mean of both.
    assert found[3] < 2.0 * found[0] and found[7] > 4.0 * found[0]


def test_times_of_trimmed_steps_do_not_correct_other_steps():
    times = served({TRIMMED: 2.0})
    assert times.longer(8)(TRIMMED) == 1.0  # nothing to compare it with
    times = served({TRIMMED: 1.5, 3: 1.1})
    assert times.longer(8)(TRIMMED) == pytest.approx(1.5, rel=0.05)
    assert times.longer(8)(7) == pytest.approx(1.1, rel=0.05)


def test_times_of_steps_without_drafts_do_not_correct_others():
    times = served({0: 1.4, 3: 1.1})
    assert times.longer(8)(0) == pytest.approx(1.4, rel=0.05)
    assert times.longer(8)(7) == pytest.approx(1.1, rel=0.05)
    assert times.longer(8)(TRIMMED) == pytest.approx(1.1, rel=0.05)


def test_batch_sizes_are_corrected_separately():
    times = served({3: 0.5, 7: 1.0}, num_reqs=8)
    assert times.correct(9, MEASURED) != MEASURED
    assert times.correct(16, MEASURED) == MEASURED


def test_pauses_hardly_count():
    times = served({3: 1.0, 7: 1.0})
    for _ in range(3):
        times.observe(8, 7, 50.0)
    found = times.correct(8, MEASURED)
    assert found[7] / found[3] == pytest.approx(2.0, rel=0.05)


def test_old_times_count_less():
    times = served({3: 0.8, 7: 1.0})
    before = times.correct(8, MEASURED)
    for _ in range(6 * HALF_LIFE):
        times.observe(8, 7, 1.0)
    after = times.correct(8, MEASURED)
    assert before[7] / before[3] == pytest.approx(2.5, rel=0.05)
    assert after[7] / after[3] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_bad_moments_do_not_seem_slow(seed: int):
    """Other load, which comes and goes within some hundred steps, makes steps of all
    plans take up to twice as long. Plan 7 takes 1.1 times as long as measured."""
    rng, times, level = np.random.default_rng(seed), ServedTimes(), 0.0
    for step in range(400):
        plan = 3 if step % 100 < 80 else 7
        level = 0.99 * level + 0.035 * rng.normal()
        own = log(1.1) if plan == 7 else 0.0
        times.observe(8, plan, exp(own + level + 0.03 * rng.normal()))
    longer = times.longer(8)
    assert longer(7) / longer(3) == pytest.approx(1.1, rel=0.08)


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
