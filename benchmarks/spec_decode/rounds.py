# SPDX-License-Identifier: Apache-2.0
"""A round: requests that start together, and what a log of its steps tells."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Step:
    """One engine step that returned tokens.

    Attributes:
        time: when it returned, seconds.
        tokens: new tokens by request.
        finished: whether a request ended with it.
    """

    time: float
    tokens: dict[str, int]
    finished: bool


@dataclass(frozen=True)
class Steady:
    """The part of a round in which every request decodes, first step excluded.

    Attributes:
        begin, end: when it began and ended, seconds.
        step_s: median duration of a step.
        mean_step_s: mean duration of a step.
        tokens_per_step: mean tokens per request and step, the acceptance length.
        num_steps: steps it is made of.
    """

    begin: float
    end: float
    step_s: float
    mean_step_s: float
    tokens_per_step: float
    num_steps: int


def find_steady(steps: list[Step], concurrency: int) -> Steady | None:
    """None where the requests were never all decoding for three steps in a row."""
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
    durations = [after.time - before.time for before, after in pairwise(run)]
    tokens = sum(sum(step.tokens.values()) for step in run[1:])
    return Steady(
        begin=run[0].time,
        end=run[-1].time,
        step_s=median(durations),
        mean_step_s=(run[-1].time - run[0].time) / len(durations),
        tokens_per_step=tokens / (len(run) - 1) / concurrency,
        num_steps=len(durations),
    )


def time_per_output_token(steps: list[Step]) -> float | None:
    """Median over requests of seconds per token after the first step's, TPOT."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    later: dict[str, int] = {}
    for step in steps:
        for request, count in step.tokens.items():
            if request in first:
                later[request] = later.get(request, 0) + count
                last[request] = step.time
            else:
                first[request] = step.time
    rates = [(last[r] - first[r]) / later[r] for r in later if later[r]]
    return median(rates) if rates else None


def seconds_to_first_tokens(
    steps: list[Step], begin: float, concurrency: int
) -> float | None:
    """From the arrival of all requests until each has its first token: prefill."""
    seen: set[str] = set()
    for step in steps:
        seen |= step.tokens.keys()
        if len(seen) == concurrency:
            return step.time - begin
    return None


def minimum_variance_rates(length: float, num_tokens: int) -> list[float]:
    """Chance that draft i is accepted given that those before it were.

    The first drafts always are and one of them sometimes, so that short rounds come
    close to the acceptance length too.

    Raises:
        ValueError: no drafter of so many tokens has this acceptance length.
    """
    accepted = length - 1
    if not 0 <= accepted <= num_tokens:
        raise ValueError(
            f"an acceptance length of {length} needs {accepted} accepted drafts, but "
            f"{num_tokens} are drafted"
        )
    return [min(max(accepted - i, 0.0), 1.0) for i in range(num_tokens)]


def conditional_rates(curve: Sequence[float]) -> list[float]:
    """Chance that draft i is accepted given that those before it were.

    Args:
        curve: chance that drafts 1 to i are all accepted, for each i.
    """
    return [here / before for before, here in pairwise([1.0, *curve])]


def mean_length(rates: Sequence[float]) -> float:
    """Mean tokens of a step whose drafts are accepted at conditional `rates`."""
    return sum(accumulate(rates, mul, initial=1.0))


def expected_tokens_per_s(
    concurrency: int, rates: Sequence[float], found: dict[str, Any]
) -> float | None:
    """Tokens per second of steady decode had acceptance been just its mean.

    How many drafts a round happens to accept varies by more than what is compared;
    how long its steps are does not.

    Args:
        found: what a round measured: mean_step_s, and drafted, steps by draft length;
            empty where every step drafts as many tokens as there are rates.
    """
    if not found["mean_step_s"]:
        return None
    drafted = found["drafted"] or {len(rates): 1}
    tokens = sum(n * mean_length(rates[: int(k)]) for k, n in drafted.items())
    return concurrency * tokens / sum(drafted.values()) / found["mean_step_s"]
