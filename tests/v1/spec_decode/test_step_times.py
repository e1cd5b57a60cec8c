# SPDX-License-Identifier: Apache-2.0
"""Step times are interpolated between the measured points."""

import pytest

from vllm.v1.spec_decode.dynamic.step_times import StepTimes, between

SHORT = 256


def step_times(by_size) -> StepTimes:
    return StepTimes({SHORT: by_size})


def test_times_between_and_beyond_measured_sizes():
    seconds = {1: {0: 1.0, 3: 2.0}, 5: {0: 1.4, 3: 6.0}}
    times = step_times(seconds)
    assert times.seconds(5, SHORT) == seconds[5]
    assert times.seconds(9, SHORT) == pytest.approx({0: 1.8, 3: 10.0})
    # The chord gives 1.2 and 4; there is no neighbour below the first point.
    assert times.seconds(3, SHORT) == pytest.approx({0: 1.1, 3: 3.0})
    assert step_times({1: {0: 1.0, 3: 2.0}}).seconds(7, 9) == {0: 1.0, 3: 2.0}


def test_interpolation_is_mean_of_chord_and_neighbours():
    line = [(1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0)]
    assert between(line, 2, 3) == pytest.approx(3.0)
    knee = [(1, 5.0), (2, 5.0), (4, 6.0), (8, 12.0)]  # from 5 on, 1.5 a request
    assert between(knee, 2, 3) == pytest.approx((5.5 + 5.0) / 2)
    bulge = [(1, 1.0), (2, 3.0), (4, 4.0), (8, 4.0)]
    assert between(bulge, 2, 3) == pytest.approx(3.5)
    noise = [(1, 5.0), (2, 4.9)]
    assert between(noise, 1, 4) == pytest.approx(5.0)


def seconds(n: int, context: int, k: int) -> float:
    """Weights are memory-bound, the KV cache is read once, and attention scores are
    computed for each verified token."""
    read, score = 3e-8, 2e-9
    return 5e-3 + 2e-5 * n * (k + 1) + n * context * (read + score * (k + 1))


def table(context: int, sizes, lengths) -> dict[int, dict[int, float]]:
    return {n: {k: seconds(n, context, k) for k in lengths} for n in sizes}


def test_context_time_is_proportional_to_requests_and_length():
    """Two longer contexts are measured with three lengths; others are inferred."""
    lengths = [0, 1, 2, 3, 5, 7]
    times = StepTimes(
        {
            SHORT: table(SHORT, (1, 8, 64), lengths),
            4096: table(4096, (1, 64), (0, 3, 7)),
            65536: table(65536, (1,), (0, 3, 7)),
        }
    )
    for n, context in ((1, 1024), (1, 131072), (8, 16384), (64, 8192), (16, 32768)):
        found = times.seconds(n, context)
        assert sorted(found) == lengths
        for k in lengths:
            assert found[k] == pytest.approx(seconds(n, context, k), rel=0.03)


def test_noise_does_not_make_long_contexts_faster():
    short = {1: {0: 5.0, 7: 7.0}}
    times = step_times(short)
    longer = StepTimes({SHORT: short, 4096: {1: {0: 4.9, 7: 6.9}}})
    assert longer.seconds(1, 65536) == times.seconds(1, SHORT) == short[1]


def test_empty_times_are_false_and_one_time_serves_shorter_contexts():
    assert not StepTimes({})
    times = step_times({1: {0: 1.0}})
    assert times and times.seconds(1, 0) == times.seconds(1, 10) == {0: 1.0}
