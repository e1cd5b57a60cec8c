# SPDX-License-Identifier: Apache-2.0
"""Step times: measured ones are interpolated, and corrected by served ones."""

from math import exp, log

import numpy as np
import pytest

from vllm.v1.spec_decode.auto.times import ServedTimes, StepTimes, plausible, size_of

SHORT, K = 256, 7


def step_times(rows) -> StepTimes:
    return StepTimes({SHORT: rows}, K)


def test_times_between_and_beyond_measured_sizes():
    rows = {1: {0: 1.0, 3: 2.0}, 5: {0: 1.4, 3: 6.0}}
    times = step_times(rows)
    assert times.seconds(5, SHORT) == rows[5]
    assert times.seconds(9, SHORT) == pytest.approx({0: 1.8, 3: 10.0})
    assert times.seconds(3, SHORT) == pytest.approx({0: 1.2, 3: 4.0})
    assert step_times({1: {0: 1.0, 3: 2.0}}).seconds(7, 9) == {0: 1.0, 3: 2.0}


def test_a_step_takes_no_longer_than_one_that_does_more():
    row = {0: 3.0, 1: 1.0, 3: 1.5, 7: 1.2, 15: 4.0, 31: 0.9}
    assert plausible(row, K) == {0: 0.9, 1: 1.0, 3: 1.2, 7: 1.2, 15: 0.9, 31: 0.9}
    times = step_times({1: {0: 1.0, 3: 9.0}, 2: {0: 2.0, 3: 3.0}, 4: {0: 1.0, 3: 4.0}})
    assert times.measured[SHORT] == {
        1: {0: 1.0, 3: 3.0},
        2: {0: 1.0, 3: 3.0},
        4: {0: 1.0, 3: 4.0},
    }


def seconds(n: int, context: int, k: int) -> float:
    """Weights are memory-bound, the KV cache is read once, and attention scores are
    computed for each verified token."""
    read, score = 3e-8, 2e-9
    return 5e-3 + 2e-5 * n * (k + 1) + n * context * (read + score * (k + 1))


def rows_at(context: int, sizes, lengths) -> dict[int, dict[int, float]]:
    return {n: {k: seconds(n, context, k) for k in lengths} for n in sizes}


def test_context_time_is_proportional_to_requests_and_length():
    """A longer context is measured with three lengths; others are inferred."""
    lengths = [0, 1, 2, 3, 5, 7]
    table = {
        SHORT: rows_at(SHORT, (1, 8, 64), lengths),
        16384: rows_at(16384, (1, 64), (0, 3, 7)),
    }
    times = StepTimes(table, K)
    for n, context in ((1, 1024), (1, 131072), (8, 16384), (64, 8192), (16, 32768)):
        found = times.seconds(n, context)
        assert sorted(found) == lengths
        for k in lengths:
            assert found[k] == pytest.approx(seconds(n, context, k), rel=0.03)


def test_noise_does_not_make_long_contexts_faster():
    short = {1: {0: 5.0, 7: 7.0}}
    longer = StepTimes({SHORT: short, 4096: {1: {0: 4.9, 7: 6.9}}}, K)
    assert longer.seconds(1, 65536) == short[1]


MEASURED = {0: 1.0, 3: 2.0, 7: 4.0}


def served(ratios: dict[int, float], num_steps: int = 20):
    times = ServedTimes()
    for plan, ratio in ratios.items():
        for _ in range(num_steps):
            times.observe(plan, ratio)
    return times


@pytest.mark.parametrize("other", [0, 7])
def test_served_plans_keep_their_ratios(other: int):
    """Plans that were not served have the level that all have in common."""
    times = served({3: 1.1, other: 1.3})
    found = times.correct({3: 1.0, other: 1.0, 5: 1.0})
    assert found[other] / found[3] == pytest.approx(1.3 / 1.1, rel=0.05)
    assert found[5] == pytest.approx(1.1, rel=0.1)


def test_batch_sizes_differ_if_they_are_further_apart():
    assert size_of(8) == size_of(9) != size_of(11) != size_of(16)
    assert served({3: 0.8}).correct(MEASURED) == MEASURED  # to compare it with


def test_pauses_hardly_count():
    times = served({3: 1.0, 7: 1.0})
    for _ in range(3):
        times.observe(7, 50.0)
    found = times.correct(MEASURED)
    assert found[7] / found[3] == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_bad_moments_do_not_seem_slow(seed: int):
    """Other load, which comes and goes within some hundred steps, makes steps of all
    plans take up to twice as long. Plan 7 takes 1.1 times as long as measured."""
    rng, times, level = np.random.default_rng(seed), ServedTimes(), 0.0
    for step in range(400):
        plan = 3 if step % 100 < 80 else 7
        level = 0.99 * level + 0.035 * rng.normal()
        of_plan = log(1.1) if plan == 7 else 0.0
        times.observe(plan, exp(of_plan + level + 0.03 * rng.normal()))
    found = times.correct({3: 1.0, 7: 1.0})
    assert found[7] / found[3] == pytest.approx(1.1, rel=0.1)
