# SPDX-License-Identifier: Apache-2.0
"""Chooses how much is drafted and verified while serving ("auto").

A plan is a number of drafts per request: none, a chain of some length, or a tree of
some number of nodes, which is above the longest chain. The engine follows the plan that
promises the most tokens per second:

    acceptance.py   what a plan yields: acceptance length, by what was accepted lately
    times.py        what a step of it takes: measured at start, corrected while serving
    verify.py       what verifying only the likeliest drafts of a large batch adds
    chooser.py      chooses by these three, and tries other plans now and then
    measure.py      times the steps of all plans at start, on the workers

Apart from `measure.py`, the package is pure Python and NumPy, and knows neither the
scheduler nor its types: `vllm/v1/core/sched/draft_policy.py` translates.
"""

from math import inf
from typing import Any

import numpy as np


class Faded:
    """A mean of which older observations count less.

    Attributes:
        total, weight: the sum of the observations, and their number. Both may be arrays
            of one shape: a mean for each element.

    Args:
        half_life: amount of `fade` (steps, drafts, seconds) after which an observation
            counts half.
        most: largest weight of all earlier observations together.
        prior: the mean without observations, which counts as `prior_weight` of them.
    """

    def __init__(
        self,
        half_life: float,
        most: float = inf,
        prior: float = 0.0,
        prior_weight: float = 0.0,
    ):
        self.half_life, self.most = half_life, most
        self.prior, self.prior_weight = prior, prior_weight
        self.total: Any = 0.0
        self.weight: Any = 0.0

    def fade(self, amount: float = 1.0) -> None:
        kept = 0.5 ** (amount / self.half_life)
        if self.most < inf:
            kept = kept * self.most / np.maximum(self.weight, self.most)
        self.total, self.weight = self.total * kept, self.weight * kept

    def add(self, value: Any, weight: Any = 1.0) -> None:
        """Adds observations of the given mean value."""
        self.total = self.total + value * weight
        self.weight = self.weight + weight

    @property
    def mean(self) -> Any:
        total = self.total + self.prior * self.prior_weight
        return total / (self.weight + self.prior_weight)
