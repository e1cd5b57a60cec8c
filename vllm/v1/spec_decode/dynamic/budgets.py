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

from typing import NamedTuple

import numpy as np

from .graph_sizes import MIN_REQUESTS, trimmed_rows
from .step_times import Row, StepTimes

# A trimmed step must promise so much more throughput: times are measured to within it.
MIN_GAIN = 0.02
# Of its drafts, what a step verifies whose time is measured; of 100, all but one.
PERCENT_VERIFIED = (10, 30, 60, 100)


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
            number of requests and per cent of drafts (`PERCENT_VERIFIED`).
        depth: K, the longest chain.
    """

    def __init__(self, times: StepTimes, trimmed: dict[int, Row], depth: int):
        self.times, self.depth = times, depth
        self._trimmed = StepTimes({0: trimmed})

    def best(
        self, num_drafts: int, chances: np.ndarray, context: float = 0.0
    ) -> Budget:
        """For a batch whose requests have as many drafts each.

        Args:
            num_drafts: of each request.
            chances: [num_reqs, K], how likely each draft is accepted if those before it
                are.
            context: tokens that a request has behind it, on average.
        """
        n = len(chances)
        everything = n * (num_drafts + 1)
        # For one draft alone, or none, what ranks them would be compiled anew.
        rows = np.array([m for m in trimmed_rows(everything - 1) if m > n + 1])
        if n < MIN_REQUESTS or not rows.size:
            return ALL
        survival = chances[:, :num_drafts].cumprod(axis=1)
        tokens = n + np.sort(survival, axis=None)[::-1].cumsum()
        seconds, of_everything = self._seconds(n, context, num_drafts, rows)
        worth = tokens[rows - n - 1] / seconds
        best = int(worth.argmax())
        gain = float(worth[best] * of_everything / tokens[-1]) - 1.0
        return Budget(int(rows[best]) - n, gain) if gain >= MIN_GAIN else ALL

    def _seconds(
        self, n: int, context: float, num_drafts: int, rows: np.ndarray
    ) -> tuple[np.ndarray, float]:
        """Of steps that verify so many rows, [len(rows)], and of one without trimming.

        Both draft as many tokens, and read as much context: they differ by what fewer
        rows save, and by what trimming costs.
        """
        by_share = self._trimmed.seconds(n, 0.0)
        shares = sorted(by_share)
        curve = np.maximum.accumulate([by_share[share] for share in shares])
        points = n + n * self.depth * np.array(shares) / 100
        verifying = np.interp([*rows, n * (num_drafts + 1)], points, curve)
        price = max(0.0, curve[-1] - self.times.seconds(n, 0.0)[self.depth])
        untrimmed = self.times.seconds(n, context)[num_drafts]
        return untrimmed + price + verifying[:-1] - verifying[-1], untrimmed
