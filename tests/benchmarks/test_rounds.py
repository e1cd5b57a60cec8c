# SPDX-License-Identifier: Apache-2.0
"""The steady part of a log of steps."""

import pytest

from benchmarks.spec_decode.worker import Step, find_steady

ROUND = [
    Step(0.0, {"a": 1}, False),  # b is still being prefilled
    Step(5.0, {"a": 3, "b": 1}, False),
    Step(6.0, {"a": 3, "b": 2}, False),
    Step(7.0, {"a": 1, "b": 2}, False),
    Step(8.0, {"a": 3, "b": 3}, False),
    Step(9.5, {"a": 1, "b": 3}, False),
    Step(99.0, {"a": 1, "b": 3}, True),
    Step(100.0, {"b": 3}, True),
]


def test_steady_part_excludes_prefill_and_tail():
    steady = find_steady(ROUND, 2)
    assert (steady.begin, steady.end, steady.steady_steps) == (6.0, 9.5, 3)
    assert steady.step_s == 1.0
    assert steady.mean_step_s == pytest.approx(3.5 / 3)
    assert steady.tokens_per_step == pytest.approx((3 + 6 + 4) / 3 / 2)
    assert find_steady(ROUND[:4], 2) is None
    assert find_steady(ROUND, 3) is None
