# SPDX-License-Identifier: Apache-2.0
"""Corrects the step times measured at start by those of steps that are served.

Times measured at start can be wrong later: other engines may have been starting on the
same device, and the host had less to do. So once several plans have been followed at a
batch size, the times of their steps correct the measured ones.

Plans are followed at different times, and other load on a machine comes and goes: then
a plan seems slow because it was followed at a bad moment. A Kalman filter (Kalman 1960)
tells the two apart. It estimates a level that all plans share, and that drifts, and
each plan's own deviation from it, which shows when one plan follows another. How fast
the level drifts, and how much single steps differ, is estimated from the differences
between successive steps of one plan.
"""

from collections.abc import Callable
from math import exp, log, log2, sqrt

import numpy as np

from .step_times import Row

LEAST_STEPS = 5  # of a plan, before its times correct those measured at start
# Steps of other plans after which the time of a plan counts half.
HALF_LIFE = 1024
SIZES_PER_DOUBLING = 2  # batch sizes per doubling that are told apart
TRIMMED = -1  # the plan of all steps that verify only part of their drafts
# Standard deviations of logarithms of ratios, before anything is observed: of the
# level; of a plan's deviation, and of that of steps that do more or less than to verify
# all drafts; of single steps, and of the drift from one step to the next.
LEVEL, OWN, OWN_OTHER, STEP, DRIFT = 1.0, 0.1, 0.3, 0.03, 0.01
LEAST_STEP, LEAST_DRIFT = 0.01, 0.005
NOISE_STEPS = 32  # over which the last two are averaged
# A tenth of all steps include a pause of the host: each counts as so many standard
# deviations at most (Huber 1964).
MOST_DEVIATIONS = 1.345
DEVIATION = 1.4826  # of normal values, relative to the median of their absolute ones


class _Noise:
    """Variances of single steps and of the drift, by the autocovariance of differences
    d between successive values: E[d d'] = -step, E[d d] = drift + 2 step."""

    def __init__(self) -> None:
        self._square, self._product = DRIFT**2 + 2 * STEP**2, -(STEP**2)
        self._median = sqrt(self._square) / DEVIATION  # of absolute differences
        self._last: float | None = None  # difference

    @property
    def step(self) -> float:
        return max(-self._product, LEAST_STEP**2)

    @property
    def drift(self) -> float:
        return max(self._square + 2 * self._product, LEAST_DRIFT**2)

    def add(self, difference: float) -> None:
        # The median moves up for one half of all differences, down for the other.
        is_larger = abs(difference) > self._median
        moved = self._median * exp((1 if is_larger else -1) / NOISE_STEPS)
        self._median = max(moved, LEAST_STEP)
        most = MOST_DEVIATIONS * DEVIATION * self._median
        difference = min(max(difference, -most), most)
        self._square += (difference**2 - self._square) / NOISE_STEPS
        if self._last is not None:
            product = difference * self._last
            self._product += (product - self._product) / NOISE_STEPS
        self._last = difference

    def interrupt(self) -> None:
        self._last = None


class _Size:
    """Ratios of served to measured times at one batch size, as logarithms.

    Attributes:
        places: of the plans in `mean` and `covariance`, whose first place is the
            level's.
        mean: [1 + P], the level and the plans' own deviations.
        covariance: [1 + P, 1 + P].
        counts: by plan, its steps.
        seen_at: by plan, number of steps of any plan up to its last one.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self.mean, self.covariance = np.zeros(1), np.array([[LEVEL**2]])
        self.counts: dict[int, int] = {}
        self.seen_at: dict[int, int] = {}
        self.num_steps, self._since_forgot, self._noise = 0, 0, _Noise()
        self._last_at = 0  # `num_all` of the last step
        self._last: tuple[int, float] | None = None  # plan and value

    def observe(self, plan: int, value: float, num_all: int) -> None:
        """Records a step.

        Args:
            value: logarithm of its ratio.
            num_all: number of steps at any batch size so far, with this one.
        """
        num_since, self._last_at = num_all - self._last_at, num_all
        self.num_steps += 1
        self.counts[plan] = self.counts.get(plan, 0) + 1
        self.seen_at[plan] = self.num_steps
        is_next = num_since == 1 and self._last is not None and self._last[0] == plan
        if is_next:
            self._noise.add(value - self._last[1])
        else:
            self._noise.interrupt()
        if not is_next or self._since_forgot == NOISE_STEPS:
            self._forget()
        self._last = plan, value
        self._drift(num_since)
        self._update(self._place(plan), value)

    def value(self, plan: int) -> float:
        """Of a plan; that of one without steps is the level."""
        place = self.places.get(plan)
        return self.mean[0] + (0.0 if place is None else self.mean[place])

    def _place(self, plan: int) -> int:
        if plan not in self.places:
            place = self.places[plan] = len(self.mean)
            self.mean = np.append(self.mean, 0.0)
            self.covariance = np.pad(self.covariance, (0, 1))
            self.covariance[place, place] = self._own(plan)
        return self.places[plan]

    @staticmethod
    def _own(plan: int) -> float:
        return (OWN if plan > 0 else OWN_OTHER) ** 2

    def _forget(self) -> None:
        """Fades plans' deviations by the steps since the last call."""
        kept = np.full(len(self.mean), 0.5 ** (self._since_forgot / HALF_LIFE))
        kept[0], self._since_forgot = 1.0, 0
        self.mean *= kept
        self.covariance *= np.outer(kept, kept)
        for plan, place in self.places.items():
            self.covariance[place, place] += (1 - kept[place] ** 2) * self._own(plan)

    def _drift(self, num_steps: int) -> None:
        self._since_forgot += 1
        if (variance := self.covariance[0, 0]) < LEVEL**2:
            drifted = variance + num_steps * self._noise.drift
            self.covariance[0, 0] = min(drifted, LEVEL**2)

    def _update(self, place: int, value: float) -> None:
        joint = self.covariance[0] + self.covariance[place]
        variance = joint[0] + joint[place] + self._noise.step
        most = MOST_DEVIATIONS * sqrt(variance)
        surprise = value - self.mean[0] - self.mean[place]
        self.mean += joint / variance * min(max(surprise, -most), most)
        self.covariance -= np.outer(joint, joint) / variance


class ServedTimes:
    """Corrects step times by plan, separately for each batch size, see `size_of`."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0

    def observe(self, num_reqs: int, plan: int, ratio: float) -> None:
        """Records a step.

        Args:
            plan: drafts of each request, or `TRIMMED`.
            ratio: its seconds, divided by those measured at start.
        """
        self._num_steps += 1
        of = self._sizes.setdefault(size_of(num_reqs), _Size())
        of.observe(plan, log(ratio), self._num_steps)

    def seen(self, num_reqs: int, least: float = 0.0) -> set[int]:
        """Plans with enough steps that have a weight above `least`: 1 for the latest,
        and the longer ago, the less."""
        if (of := self._sizes.get(size_of(num_reqs))) is None:
            return set()
        return {
            plan
            for plan, count in of.counts.items()
            if count >= LEAST_STEPS
            and 0.5 ** ((of.num_steps - of.seen_at[plan]) / HALF_LIFE) > least
        }

    def correct(self, num_reqs: int, measured: Row) -> Row:
        """Seconds of a step by plan, corrected."""
        longer = self.longer(num_reqs)
        return {plan: seconds * longer(plan) for plan, seconds in measured.items()}

    def longer(self, num_reqs: int) -> Callable[[int], float]:
        """The factor of a plan's measured seconds, as a function of the plan: that of
        one without steps is what plans have in common, and that of one followed long
        ago tends to it."""
        if len(self.seen(num_reqs)) < 2:
            return lambda plan: 1.0
        of = self._sizes[size_of(num_reqs)]
        return lambda plan: exp(of.value(plan))


def size_of(num_reqs: int) -> int:
    """The batch size that `num_reqs` requests count as."""
    return round(SIZES_PER_DOUBLING * log2(num_reqs))
