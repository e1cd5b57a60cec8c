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

from typing import NamedTuple

import numpy as np

from .graph_sizes import trimmed_rows
from .served_times import TRIMMED, ServedTimes
from .step_times import StepTimes, TrimmedTimes

# A trimmed step must promise this much more throughput: times are no more precise.
MIN_GAIN = 0.02


class Budget(NamedTuple):
    """How many drafts of a batch to verify."""

    num_drafts: int | None  # None: all of them
    gain: float  # throughput relative to verifying all of them, minus 1

    def mean_gain(self, share: float) -> float:
        """The gain over steps of which only this share can be trimmed."""
        saved = self.gain / (1.0 + self.gain)  # of a step's time
        return 1.0 / (1.0 - share * saved) - 1.0


ALL = Budget(None, 0.0)


class Budgets:
    """Chooses budgets by step times.

    Args:
        times: of steps that verify all their drafts.
        trimmed: of steps that verify part of them.
        served: corrections of these times.
    """

    def __init__(
        self,
        times: StepTimes,
        trimmed: TrimmedTimes,
        served: ServedTimes | None = None,
    ):
        self.times = times
        self._served = served or ServedTimes()
        self._trimmed = {k: StepTimes({0: trimmed[k]}) for k in sorted(trimmed)}
        self._of_a_draft: dict[int, float] = {}

    def best(
        self,
        num_drafts: int,
        survival: np.ndarray,
        expected: float,
        context: float = 0.0,
    ) -> Budget:
        """The budget of a batch whose requests all have `num_drafts` drafts.

        Args:
            num_drafts: of each request.
            survival: [num_reqs, at least num_drafts], probability that each draft and
                all before it are accepted, so it falls from draft to draft.
            expected: mean acceptance length if all drafts are verified. `survival` is
                not enough for that: where a chance is not known, the mean rate stands
                for it, and that is too high behind unlikely drafts.
            context: mean tokens of a request so far.
        """
        n = len(survival)
        everything = n * (num_drafts + 1)
        rows = np.array([m for m in trimmed_rows(everything - 1) if m > n])
        is_timed = num_drafts in self.times.seconds(n, context)
        if not rows.size or not is_timed:  # as of chains that max_model_len cuts off
            return ALL
        tokens = n + np.sort(survival[:, :num_drafts], axis=None)[::-1].cumsum()
        seconds, of_everything = self._seconds(n, context, num_drafts, rows)
        longer = self._served.longer(n)
        worth = tokens[rows - n - 1] / (seconds * longer(TRIMMED))
        of_everything *= longer(num_drafts)
        best = int(worth.argmax())
        gain = float(worth[best] * of_everything / (n * expected)) - 1.0
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

        Trimmed steps were measured for few numbers of drafts, at a short context: their
        seconds are adapted to fewer drafts, and to the context as those of untrimmed
        steps are.
        """
        drafted = next(k for k in self._trimmed if k >= num_drafts)
        lengths, curve = self._curve(n, drafted)
        # Other load makes a step seem longer, not shorter. If one really takes longer
        # than one that verifies more, the other is better anyway.
        at_most = np.minimum.accumulate(curve[::-1])[::-1]
        curve = np.interp(rows / n - 1, lengths, at_most)
        saved = (drafted - num_drafts) * self._seconds_of_a_draft(n)
        untrimmed = self.times.seconds(n, context)[num_drafts]
        longer = untrimmed - self.times.seconds(n, 0.0)[num_drafts]
        return curve - saved + longer, untrimmed

    def _curve(
        self, n: int, drafted: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Drafts verified of each request, ascending, and the seconds of such steps."""
        row = self._trimmed[drafted].seconds(n, 0.0)
        verified, seconds = zip(*sorted(row.items()), strict=True)
        return verified, seconds

    def _seconds_of_a_draft(self, n: int) -> float:
        """Seconds that drafting one token more adds to a step that verifies as much;
        0 if trimmed steps were measured for one number of drafts only."""
        if n not in self._of_a_draft:
            few, many = min(self._trimmed), max(self._trimmed)
            verified, seconds = self._curve(n, few)
            more = np.interp(verified, *self._curve(n, many)) - seconds
            # The median is robust to outliers.
            self._of_a_draft[n] = max(0.0, np.median(more) / max(1, many - few))
        return self._of_a_draft[n]
