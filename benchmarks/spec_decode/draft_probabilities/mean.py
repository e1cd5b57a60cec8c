# SPDX-License-Identifier: Apache-2.0
"""A mean over requests, and how far chance may have moved it."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

Counts = Sequence[Sequence[int]]  # for each request, its steps and their tokens


def mean_length(counts: Counts) -> dict[str, Any]:
    """Tokens of a step, over requests whose steps are not independent.

    Raises:
        ValueError: fewer than two requests tell nothing of an error.
    """
    if len(counts) < 2:
        raise ValueError("one request has no spread: raise --prompts")
    shares = _shares(counts)
    return {
        "acceptance_length": round(_length(counts), 4),
        "standard_error": round(_error(shares), 4),
        "requests": len(counts),
        "counts": [list(pair) for pair in counts],
    }


def gain_error(without: Counts, given: Counts) -> float:
    """Standard error of the difference of two means over the same prompts."""
    pairs = zip(_shares(without), _shares(given), strict=True)
    return _error([ours - others for others, ours in pairs])


def _length(counts: Counts) -> float:
    steps, tokens = (sum(column) for column in zip(*counts, strict=True))
    return tokens / steps


def _shares(counts: Counts) -> list[float]:
    """By how much each request moves the mean."""
    length, steps = _length(counts), sum(taken for taken, _ in counts)
    return [(given - length * taken) / steps for taken, given in counts]


def _error(shares: list[float]) -> float:
    squares = sum(share**2 for share in shares)
    return sqrt(squares * len(shares) / (len(shares) - 1))
