# SPDX-License-Identifier: Apache-2.0
"""Ties of two tokens are distinguished from errors."""

import pytest

from vllm.benchmarks.drafters.compare import Comparison, compare, tolerance
from vllm.benchmarks.drafters.engine import Answer
from vllm.platforms import current_platform

WITHIN = 0.1
ROW = {1: -0.5, 2: -0.55, 3: -3.0}


@pytest.mark.parametrize(
    ("found", "at", "is_tie"),
    [
        ([1, 1, 1], None, None),
        ([1, 2, 5], 1, True),
        ([1, 3, 1], 1, False),
        ([1, 1, 99], 2, False),  # at most as likely as the last of the logprobs
        ([1, 1], 2, False),
        ([1, 1, 1, 1], 3, False),
    ],
)
def test_first_difference(found, at, is_tie):
    difference = compare(0, Answer([1, 1, 1], [ROW] * 3), found)
    if at is None:
        assert difference is None
    else:
        assert (difference.at, difference.gap <= WITHIN) == (at, is_tie)


def test_comparison():
    expected = [Answer([1], [ROW])] * 2
    answers = [Answer([token]) for token in (1, 2, 3, 1)]  # prompts repeat
    comparison = Comparison()
    comparison.add(expected, answers, WITHIN)
    (error,) = comparison.errors
    assert (comparison.same, comparison.ties, error.request) == (2, 1, 0)
    assert "2 of 4 the same" in str(comparison) and "1 DIFFER" in str(comparison)


def test_tolerance():
    assert tolerance("bfloat16") > 0.5  # how far two tokens on an H200 were apart
    assert tolerance("float16") >= tolerance("float32") > 0
    # On an H200 attention in TF32 had two tokens 0.0016 nats apart change places.
    assert (tolerance("float32") > 0.0016) != current_platform.is_cpu()
