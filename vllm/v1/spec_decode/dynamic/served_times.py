# SPDX-License-Identifier: Apache-2.0
"""How long steps take as requests are served, beside what was measured at start.

What is measured at start can be wrong for what comes later: other engines may have
started on the same device, and the host then had less to do. So where several plans
have been followed with as many requests, what they took corrects what was measured.
Pure Python.
"""

from collections import deque
from collections.abc import Callable
from math import exp, log, log2
from statistics import median

from .step_times import Row

# Steps of a plan whose median counts, and how many it takes: a host's pause is a step.
NUM_STEPS = 15
LEAST_STEPS = 5
# Steps of other plans after which what was seen of one counts half.
HALF_LIFE = 1024
SIZES_PER_DOUBLING = 2  # numbers of requests that are closer count as one
TRIMMED = -1  # stands for the plan of a step that verifies a part of its drafts


class _Plan:
    """Logarithms of how much longer steps took than measured, and when."""

    def __init__(self) -> None:
        self.steps: deque[float] = deque(maxlen=NUM_STEPS)
        self.value, self.seen_at = 0.0, 0


class ServedTimes:
    """Corrects step times by plan, apart for each size of a batch, see `size_of`."""

    def __init__(self) -> None:
        self._plans: dict[int, dict[int, _Plan]] = {}
        self._num_steps: dict[int, int] = {}

    def observe(self, num_reqs: int, plan: int, ratio: float) -> None:
        """Takes in a step.

        Args:
            plan: drafts of each request; else `TRIMMED`.
            ratio: of the seconds it took to those that were measured.
        """
        size = size_of(num_reqs)
        at = self._num_steps[size] = self._num_steps.get(size, 0) + 1
        of_plan = self._plans.setdefault(size, {}).setdefault(plan, _Plan())
        of_plan.steps.append(log(ratio))
        of_plan.value, of_plan.seen_at = median(of_plan.steps), at

    def seen(self, num_reqs: int, least: float = 0.0) -> set[int]:
        """Plans of which enough steps were seen, that weigh more than `least`."""
        weights = self._weights(num_reqs).items()
        return {plan for plan, weight in weights if weight > least}

    def _weights(self, num_reqs: int) -> dict[int, float]:
        """By plan of which enough steps were seen: 1; the longer ago, the less."""
        size = size_of(num_reqs)
        return {
            plan: 0.5 ** ((self._num_steps[size] - seen.seen_at) / HALF_LIFE)
            for plan, seen in self._plans.get(size, {}).items()
            if len(seen.steps) >= LEAST_STEPS
        }

    def correct(self, num_reqs: int, measured: Row) -> Row:
        """Seconds of a step by plan, as far as they compare."""
        longer = self.longer(num_reqs)
        return {plan: seconds * longer(plan) for plan, seconds in measured.items()}

    def longer(self, num_reqs: int) -> Callable[[int], float]:
        """What to multiply a plan's measured seconds by.

        A plan of which nothing was seen takes as much longer as the others do, and so
        in the end does one that was followed long ago. What trimming adds says nothing
        of steps without.
        """
        weights, size = self._weights(num_reqs), size_of(num_reqs)
        whole = [plan for plan in weights if plan >= 0]
        if len(weights) < 2 or not whole:
            return lambda plan: 1.0
        values = {plan: self._plans[size][plan].value for plan in weights}
        shared = sum(weights[plan] * values[plan] for plan in whole)
        shared /= sum(weights[plan] for plan in whole)

        def longer(plan: int) -> float:
            weight = weights.get(plan, 0.0)
            return exp(shared + weight * (values.get(plan, shared) - shared))

        return longer


def size_of(num_reqs: int) -> int:
    """Which size of a batch so many requests are."""
    return round(SIZES_PER_DOUBLING * log2(num_reqs))
