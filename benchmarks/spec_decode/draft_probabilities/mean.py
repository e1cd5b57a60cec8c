# SPDX-License-Identifier: Apache-2.0
"""A mean over requests, and how far chance may have moved it."""

from collections.abc import Sequence
from math import sqrt


def mean_length(counts: Sequence[Sequence[int]]) -> dict[str, float | int]:
    """Tokens of a step, over requests whose steps are not independent.

    Args:
        counts: for each request, its steps and the tokens they gave.

    Raises:
        ValueError: fewer than two requests tell nothing of an error.
    """
    if len(counts) < 2:
        raise ValueError("one request has no spread: raise --prompts")
    steps, tokens = (sum(column) for column in zip(*counts, strict=True))
    length = tokens / steps
    squares = sum((given - length * taken) ** 2 for taken, given in counts)
    spread = sqrt(squares * len(counts) / (len(counts) - 1))
    return {
        "acceptance_length": round(length, 4),
        "standard_error": round(spread / steps, 4),
        "requests": len(counts),
        "steps": steps,
    }
