# SPDX-License-Identifier: Apache-2.0
"""A round: requests that start together, and statistics of its steps."""

from itertools import pairwise
from statistics import median
from typing import NamedTuple


class Step(NamedTuple):
    """One engine step that returned tokens.

    Attributes:
        time: when the step returned, in seconds.
        tokens: new tokens by request.
        finished: whether a request finished in it.
    """

    time: float
    tokens: dict[str, int]
    finished: bool


class Steady(NamedTuple):
    """The part of a round in which every request decodes, first step excluded.

    Attributes:
        begin, end: when it began and ended, in seconds.
        step_s: median duration of a step; `mean_step_s` is the mean.
        tokens_per_step: mean tokens per request and step, the acceptance length.
        steady_steps: number of its steps.
    """

    begin: float
    end: float
    step_s: float | None = None
    mean_step_s: float | None = None
    tokens_per_step: float | None = None
    steady_steps: int = 0


def find_steady(steps: list[Step], concurrency: int) -> Steady | None:
    """None if there were no three steps in a row in which all requests decode."""
    seen: set[str] = set()
    run: list[Step] = []
    for step in steps:
        decoding = len(seen) == concurrency == len(step.tokens)
        seen |= step.tokens.keys()
        if decoding and not step.finished:
            run.append(step)
        elif run:
            break
    if len(run) < 3:
        return None
    begin, end, num_steps = run[0].time, run[-1].time, len(run) - 1
    durations = [after.time - before.time for before, after in pairwise(run)]
    tokens = sum(sum(step.tokens.values()) for step in run[1:])
    length, mean_s = tokens / num_steps / concurrency, (end - begin) / num_steps
    return Steady(begin, end, median(durations), mean_s, length, num_steps)
