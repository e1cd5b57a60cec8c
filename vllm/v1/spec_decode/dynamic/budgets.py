# SPDX-License-Identifier: Apache-2.0
"""How many of a batch's drafts are verified, where the likeliest ones come first.

In a large batch each row that is verified costs time, and the last drafts of a chain
are seldom accepted. What a request's own drafts are worth is told by how sure the
drafter was. So of all drafts of a batch those are verified that are likeliest to be
accepted together with those before them: as many as yield most tokens per second
(D-Cut; DSpark, arXiv 2607.05147; vLLM pull requests #47808 and #52228).

Which drafts they are is decided on the device, by what the drafter said a moment ago.
How many, here, by what it said some steps ago. Trimming has a price: it takes kernels
that choose, and graphs of ragged batches. Where it promises less it is left.
"""

from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from vllm.config.drafter.length import MIN_REQUESTS

from .graph_sizes import trimmed_rows
from .served_times import TRIMMED, ServedTimes
from .step_times import Row, StepTimes

# A trimmed step must promise so much more throughput: times are measured to within it.
MIN_GAIN = 0.02


class Budget(NamedTuple):
    """How many drafts of a batch to verify."""

    num_drafts: int | None  # None: all of them
    gain: float  # throughput over that of all of them, less one


ALL = Budget(None, 0.0)


class Budgets:
    """Chooses budgets by step times.

    Args:
        times: of steps that verify all their drafts.
        trimmed: seconds of steps that draft K tokens and verify a part of as many, by
            number of requests and drafts verified of each, on average; K: all but one.
        depth: K, the longest chain.
        served: how much longer steps take than was measured.
    """

    def __init__(
        self,
        times: StepTimes,
        trimmed: dict[int, Row],
        depth: int,
        served: ServedTimes | None = None,
    ):
        self.times, self.depth = times, depth
        self._served = served or ServedTimes()
        self._trimmed = StepTimes({0: trimmed})
        self._draft_seconds: dict[int, float] = {}

    def best(
        self, num_drafts: int, survival: np.ndarray, context: float = 0.0
    ) -> Budget:
        """For a batch whose requests have as many drafts each.

        Args:
            num_drafts: of each request.
            survival: [num_reqs, at least num_drafts], how likely each draft is
                accepted, which falls from draft to draft.
            context: tokens that a request has behind it, on average.
        """
        n = len(survival)
        everything = n * (num_drafts + 1)
        rows = np.array([m for m in trimmed_rows(everything - 1) if m > n])
        if n < MIN_REQUESTS or not rows.size:
            return ALL
        tokens = n + np.sort(survival[:, :num_drafts], axis=None)[::-1].cumsum()
        seconds, of_everything = self._seconds(n, context, num_drafts, rows)
        longer = self._served.longer(n)
        worth = tokens[rows - n - 1] / (seconds * longer(TRIMMED))
        of_everything *= longer(num_drafts)
        best = int(worth.argmax())
        gain = float(worth[best] * of_everything / tokens[-1]) - 1.0
        return Budget(int(rows[best]) - n, gain) if gain >= MIN_GAIN else ALL

    def observe_seconds(
        self, n: int, context: float, num_drafts: int, budget: int, seconds: float
    ) -> None:
        """Takes in what a step took that verified so many of its drafts."""
        measured, _ = self._seconds(n, context, num_drafts, np.array([n + budget]))
        self._served.observe(n, TRIMMED, seconds / float(measured[0]))

    def _seconds(
        self, n: int, context: float, num_drafts: int, rows: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Of steps that verify so many rows, [len(rows)], and of one without trimming.

        What was measured drafted K tokens each, and read little context.
        """
        lengths, curve = zip(
            *sorted(self._trimmed.seconds(n, 0.0).items()), strict=True
        )
        curve = np.interp(rows / n - 1, lengths, np.maximum.accumulate(curve))
        undrafted = self.depth - num_drafts
        saved = undrafted * self._seconds_of_a_draft(n) if undrafted else 0.0
        untrimmed = self.times.seconds(n, context)[num_drafts]
        longer = untrimmed - self.times.seconds(n, 0.0)[num_drafts]
        return curve - saved + longer, untrimmed

    def _seconds_of_a_draft(self, n: int) -> float:
        """What drafting a token less saves: in steps that verify as many, those that
        are trimmed drafted K. The median of slopes minds no outlier (Theil 1950)."""
        if n not in self._draft_seconds:
            trimmed, times = self._trimmed.seconds(n, 0.0), self.times.seconds(n, 0.0)
            more = [(k, trimmed[k] - times[k]) for k in trimmed if k in times]
            slopes = [
                (before - after) / (k - j)
                for (j, before), (k, after) in combinations(sorted(more), 2)
            ]
            self._draft_seconds[n] = max(0.0, median(slopes)) if slopes else 0.0
        return self._draft_seconds[n]
