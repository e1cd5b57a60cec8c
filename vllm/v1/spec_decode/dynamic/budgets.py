# SPDX-License-Identifier: Apache-2.0
"""Chooses how many drafts of a batch are verified, the most likely ones first.

In a large batch each verified row takes time, and the last drafts of a chain are seldom
accepted. How likely the drafts of a request are accepted shows in the drafter's
confidence. So a trimmed step verifies only those drafts of the batch that are most
likely accepted together with all before them, as many as give the most tokens per
second (D-Cut; DSpark, arXiv 2607.05147; vLLM pull requests #47808 and #52228).

Which drafts these are is decided on the device, by the drafter's latest confidence; how
many there are is decided here, by that of earlier steps. Trimming has a price: kernels
that select drafts, and CUDA graphs of ragged batches. So a step is trimmed only if it
gains enough.
"""

from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from .graph_sizes import trimmed_rows
from .served_times import TRIMMED, ServedTimes
from .step_times import Row, StepTimes

# A trimmed step must promise this much more throughput: times are no more precise.
MIN_GAIN = 0.02


class Budget(NamedTuple):
    """How many drafts of a batch to verify."""

    num_drafts: int | None  # None: all of them
    gain: float  # throughput relative to verifying all of them, minus 1


ALL = Budget(None, 0.0)


class Budgets:
    """Chooses budgets by step times.

    Args:
        times: of steps that verify all their drafts.
        trimmed: seconds of steps that draft K tokens per request and verify part of
            them, by number of requests and by mean number of drafts verified of each;
            K stands for all but one of the batch.
        depth: K, the longest chain.
        served: corrections of these times.
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
        """The budget of a batch whose requests all have `num_drafts` drafts.

        Args:
            num_drafts: of each request.
            survival: [num_reqs, at least num_drafts], probability that each draft and
                all before it are accepted, so it falls from draft to draft.
            context: mean tokens of a request so far.
        """
        n = len(survival)
        everything = n * (num_drafts + 1)
        rows = np.array([m for m in trimmed_rows(everything - 1) if m > n])
        if not rows.size:
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
        """Records the time of a step that verified `budget` drafts of the batch."""
        measured, _ = self._seconds(n, context, num_drafts, np.array([n + budget]))
        self._served.observe(n, TRIMMED, seconds / float(measured[0]))

    def _seconds(
        self, n: int, context: float, num_drafts: int, rows: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Seconds of steps that verify `rows`, [len(rows)], and of an untrimmed one.

        The measured steps drafted K tokens per request, at a short context: seconds are
        adapted to fewer drafts, and to the context as those of untrimmed steps are.
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
        """Seconds saved per token that is not drafted: of two steps that verify equally
        many, the trimmed one drafted K. The median of slopes is robust to outliers
        (Theil 1950)."""
        if n not in self._draft_seconds:
            trimmed, times = self._trimmed.seconds(n, 0.0), self.times.seconds(n, 0.0)
            more = [(k, trimmed[k] - times[k]) for k in trimmed if k in times]
            slopes = [
                (before - after) / (k - j)
                for (j, before), (k, after) in combinations(sorted(more), 2)
            ]
            self._draft_seconds[n] = max(0.0, median(slopes)) if slopes else 0.0
        return self._draft_seconds[n]
