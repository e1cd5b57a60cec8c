# SPDX-License-Identifier: Apache-2.0
"""How many of a batch's drafts are verified, where the likeliest ones come first.

In a large batch each row that is verified costs time, and the last drafts of a chain
are seldom accepted. What a request's own drafts are worth is told by how sure the
drafter was. So of all drafts of a batch those are verified that are likeliest to be
accepted together with those before them: as many as yield most tokens per second
(D-Cut; DSpark, arXiv 2607.05147; vLLM pull requests #47808 and #52228).

Of trees, whose nodes are numbered from the likeliest on, the first nodes of each are
verified, as chains are from their first draft on.

Which drafts they are is decided on the device, by what the drafter said a moment ago.
How many, here, by what it said some steps ago. Trimming has a price: it takes kernels
that choose, and graphs of ragged batches. Where it promises less it is left.
"""

from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from vllm.config.drafter.length import MAX_TREE_ROWS, MIN_REQUESTS, SHARED_ROWS

from .graph_sizes import trimmed_rows
from .served_times import TRIMMED_CHAINS, TRIMMED_TREES, ServedTimes
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

    _plan = TRIMMED_CHAINS
    _most_rows = float("inf")  # of a step that verifies all its drafts

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
        # For one draft alone, or none, what ranks them would be compiled anew.
        rows = np.array([m for m in self._rows(everything - 1) if m > n + 1])
        if n < MIN_REQUESTS or not rows.size:
            return ALL
        tokens = n + np.sort(survival[:, :num_drafts], axis=None)[::-1].cumsum()
        seconds, of_everything = self._seconds(n, context, num_drafts, rows)
        longer = self._served.longer(n)
        worth = tokens[rows - n - 1] / (seconds * longer(self._plan))
        of_everything *= longer(num_drafts)
        best = int(worth.argmax())
        gain = float(worth[best] * of_everything / tokens[-1]) - 1.0
        trims = gain >= MIN_GAIN or everything > self._most_rows
        return Budget(int(rows[best]) - n, gain) if trims else ALL

    def observe_seconds(
        self, n: int, context: float, num_drafts: int, budget: int, seconds: float
    ) -> None:
        """Takes in what a step took that verified so many of its drafts."""
        measured, _ = self._seconds(n, context, num_drafts, np.array([n + budget]))
        self._served.observe(n, self._plan, seconds / float(measured[0]))

    def _rows(self, most: int) -> list[int]:
        """Of trimmed batches that have graphs."""
        return trimmed_rows(most)

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


class TreeBudgets(Budgets):
    """Of batches of trees, which are never verified whole where they have many rows.

    Args:
        times: as `Budgets` has it.
        trimmed: seconds of steps that draft trees and verify a part of their nodes, by
            number of requests and rows of the batch.
        depth: K, as `Budgets` has it.
        served: as `Budgets` has it.
    """

    _plan = TRIMMED_TREES
    _most_rows = MAX_TREE_ROWS

    def _rows(self, most: int) -> list[int]:
        return [rows for rows in SHARED_ROWS if rows <= most]

    def _seconds(
        self, n: int, context: float, num_drafts: int, rows: np.ndarray
    ) -> tuple[np.ndarray, float]:
        measured = sorted(self._trimmed.seconds(n, 0.0).items())
        of_rows, curve = zip(*measured, strict=True)
        curve = np.interp(rows, of_rows, np.maximum.accumulate(curve))
        longer = self.times.seconds(n, context)
        # A part of a tree reads a request's context once, as a chain does.
        added = longer[self.depth] - self.times.seconds(n, 0.0)[self.depth]
        return curve + added, longer[num_drafts]
