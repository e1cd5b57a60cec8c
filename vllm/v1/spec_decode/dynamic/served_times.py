# SPDX-License-Identifier: Apache-2.0
"""Corrects the step times measured at start by those of steps that are served.

Times measured at start can be wrong later: other engines may have been starting on the
same device, and the host had less to do. So once several plans have been followed at a
batch size, the times of their steps correct the measured ones. Pure Python.
"""

from collections import deque
from collections.abc import Callable
from math import exp, log, log2
from statistics import median

from .step_times import Row

# A plan's time is the median of its last `NUM_STEPS` steps, once there are
# `LEAST_STEPS`: a single step may include a pause of the host.
NUM_STEPS = 15
LEAST_STEPS = 5
# Steps of other plans after which the time of a plan counts half.
HALF_LIFE = 1024
SIZES_PER_DOUBLING = 2  # batch sizes per doubling that are told apart
TRIMMED = -1  # the plan of all steps that verify only part of their drafts


class _Plan:
    """Logarithms of the ratios of served to measured times, and when they were seen."""

    def __init__(self) -> None:
        self.steps: deque[float] = deque(maxlen=NUM_STEPS)
        self.value, self.seen_at = 0.0, 0


class ServedTimes:
    """Corrects step times by plan, separately for each batch size, see `size_of`."""

    def __init__(self) -> None:
        self._plans: dict[int, dict[int, _Plan]] = {}
        self._num_steps: dict[int, int] = {}

    def observe(self, num_reqs: int, plan: int, ratio: float) -> None:
        """Records a step.

        Args:
            plan: drafts of each request, or `TRIMMED`.
            ratio: its seconds, divided by those measured at start.
        """
        size = size_of(num_reqs)
        at = self._num_steps[size] = self._num_steps.get(size, 0) + 1
        of_plan = self._plans.setdefault(size, {}).setdefault(plan, _Plan())
        of_plan.steps.append(log(ratio))
        of_plan.value, of_plan.seen_at = median(of_plan.steps), at

    def seen(self, num_reqs: int, least: float = 0.0) -> set[int]:
        """Plans with enough steps that have a weight above `least`."""
        weights = self._weights(num_reqs).items()
        return {plan for plan, weight in weights if weight > least}

    def _weights(self, num_reqs: int) -> dict[int, float]:
        """By plan with enough steps: 1 for the latest; the longer ago, the less."""
        size = size_of(num_reqs)
        return {
            plan: 0.5 ** ((self._num_steps[size] - seen.seen_at) / HALF_LIFE)
            for plan, seen in self._plans.get(size, {}).items()
            if len(seen.steps) >= LEAST_STEPS
        }

    def correct(self, num_reqs: int, measured: Row) -> Row:
        """Seconds of a step by plan, corrected."""
        longer = self.longer(num_reqs)
        return {plan: seconds * longer(plan) for plan, seconds in measured.items()}

    def longer(self, num_reqs: int) -> Callable[[int], float]:
        """The factor of a plan's measured seconds, as a function of the plan.

        A plan of which nothing was seen gets the weighted mean of the others, and one
        that was followed long ago tends to it. Trimmed steps do not count in the mean,
        since what trimming adds is not in other steps; nor do steps without drafts if
        any with drafts were seen, since those do more.
        """
        weights, size = self._weights(num_reqs), size_of(num_reqs)
        drafting = [plan for plan in weights if plan > 0]
        whole = drafting or [plan for plan in weights if plan == 0]
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
    """The batch size that `num_reqs` requests count as."""
    return round(SIZES_PER_DOUBLING * log2(num_reqs))
