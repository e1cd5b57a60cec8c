# SPDX-License-Identifier: Apache-2.0
"""Chooses how many drafts of a batch are verified, the likeliest ones first.

In a large batch each verified row takes time, and the last drafts of a chain are seldom
accepted. How likely the drafts of a request are accepted shows in the drafter's
confidence. So a trimmed step verifies only those drafts of the batch that are most
likely accepted together with all before them, as many as give the most tokens per
second (D-Cut; DSpark, arXiv 2607.05147; vLLM pull requests #47808 and #52228).

**Which drafts** these are is decided on the device, by the drafter's latest confidence.
Output keeps the target's distribution if whether a draft is verified depends neither on
that draft, nor on the noise that samples or verifies it: then it is a stopping rule,
like that of speculative sampling itself (arXiv 2211.17192, 2403.10444). It is: the
cumulative probability falls from draft to draft of a request, and an acceptance
probability depends only on the drafts *before* it.

**How many** is decided here, and must not depend on them, either. It is computed from
probabilities of earlier steps; but the noise that samples a draft is keyed by its
position, and a later step samples there again. So only those probabilities are used
that depend on final text: of the accepted drafts, of the first rejected one, and of the
one after it. The others are replaced by mean acceptance rates.

**Trees** are verified whole, and so are steps with prompts: what trimming adds to a
draft length depends on how many steps have one.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .acceptance import ALL_GREEDY, HALF_LIFE, Acceptance, Faded
from .times import Curves, StepTimes

if TYPE_CHECKING:
    from .chooser import Load

# A trimmed step must promise this much more throughput: times are no more precise.
# Halved or doubled, the replay changes by 0.1 %.
MIN_GAIN = 0.02


class PartialSteps(NamedTuple):
    """Steps that verify only part of their drafts.

    Attributes:
        seconds: of those with the longest chains.
        least: requests of the smallest batch.
        rows: numbers of rows up to a given one at which they have CUDA graphs.
    """

    seconds: Curves
    least: int
    rows: Callable[[int], list[int]]


class Budget(NamedTuple):
    """How many drafts of a batch to verify."""

    num_drafts: int | None  # None: all of them
    gain: float  # throughput relative to verifying all of them, minus 1


ALL = Budget(None, 0.0)


class Verifier:
    """Chooses budgets by step times, and by what the drafter's confidence says.

    Args:
        times: of steps that verify all their drafts.
        partial: which steps can be trimmed.
        acceptance: as observed.
    """

    def __init__(self, times: StepTimes, partial: PartialSteps, acceptance: Acceptance):
        self._times, self._acceptance = times, acceptance
        self._trimmed = StepTimes({0: partial.seconds}, times.depth)
        self.least, self._rows, self.depth = partial.least, partial.rows, times.depth
        self._share = Faded(HALF_LIFE)  # of steps that can be trimmed
        self._share.add(HALF_LIFE, HALF_LIFE)
        # [requests, K], of the chains reported last; while trees are verified, what
        # trimming chains would gain follows from them.
        self._latest = np.empty((0, times.depth), dtype=np.float32)
        self._best: dict[tuple[int, int], Budget] = {}  # until the next report

    def report(
        self, probabilities: np.ndarray, num_tokens: np.ndarray, num_drafts: np.ndarray
    ) -> None:
        """Takes in acceptance probabilities of a step's drafts.

        Args:
            probabilities: [requests, K], each given that the drafts before it are
                accepted.
            num_tokens: [requests], sampled tokens.
            num_drafts: [requests].
        """
        known = np.minimum(num_tokens + 1, num_drafts)
        is_known = np.arange(self.depth) < known[:, None]
        rates = self._acceptance.rates(ALL_GREEDY)
        self._latest = np.where(is_known, probabilities, np.float32(rates))
        self._best.clear()

    def count(self, is_trimmable: bool) -> None:
        """Counts a step with chains of a large batch."""
        self._share.fade()
        self._share.add(float(is_trimmable))

    def may_trim(self, load: "Load") -> bool:
        """Whether there are enough requests, all can use drafts, and none has a
        grammar."""
        is_large = load.num_reqs >= self.least
        return is_large and not load.has_grammar and load.num_drafting == load.num_reqs

    def gains(self, load: "Load", plans: Iterable[int]) -> dict[int, float]:
        """Throughput that trimming adds to each length of chains, as a share, if as
        many steps can be trimmed as lately."""
        found: dict[int, float] = {}
        for plan in plans:
            if 0 < plan <= self.depth and self.may_trim(load):
                gain = self.best(load.num_reqs, plan, load).gain
                saved = self._share.mean * gain / (1.0 + gain)  # of a step's time
                found[plan] = 1.0 / (1.0 - saved) - 1.0
        return found

    def best(self, num_reqs: int, num_drafts: int, load: "Load") -> Budget:
        """The budget of a batch whose requests all have `num_drafts` drafts; the same
        until probabilities are reported again."""
        key = num_reqs, num_drafts
        if key not in self._best:
            expected = self._acceptance.expected_tokens(load.shares)[num_drafts]
            reached = self._reached(num_reqs, num_drafts, load)
            self._best[key] = self._compute(num_drafts, reached, expected, load.context)
        return self._best[key]

    def _reached(self, num_reqs: int, num_drafts: int, load: "Load") -> np.ndarray:
        """[num_reqs, num_drafts], cumulative probabilities; by mean acceptance rates of
        requests of which nothing was reported."""
        rates = np.float32([self._acceptance.rates(load.shares)])
        missing = max(num_reqs - len(self._latest), 0)
        known = np.concatenate([self._latest, rates.repeat(missing, axis=0)])
        return known[:num_reqs, :num_drafts].cumprod(axis=1)

    def _compute(
        self, num_drafts: int, reached: np.ndarray, expected: float, context: float
    ) -> Budget:
        """The best budget.

        Args:
            expected: mean acceptance length if all drafts are verified. `reached` does
                not give it: where a probability is not known, the mean rate stands for
                it, which is too high behind unlikely drafts.
        """
        n, times = len(reached), self._times.seconds(len(reached), context)
        rows = np.array([m for m in self._rows(n * (num_drafts + 1) - 1) if m > n])
        if not rows.size or num_drafts not in times:  # cut off by max_model_len
            return ALL
        tokens = n + np.sort(reached, axis=None)[::-1].cumsum()
        worth = tokens[rows - n - 1] / self.seconds(n, context, num_drafts, rows)
        best = int(worth.argmax())
        of_all = n * expected / times[num_drafts]
        gain = float(worth[best]) / of_all - 1.0
        return Budget(int(rows[best]) - n, gain) if gain >= MIN_GAIN else ALL

    def seconds(self, n: int, context: float, num_drafts: int, rows: Any) -> Any:
        """Seconds of a step that verifies `rows`, a number or an array, not corrected.

        They are those of a step that verifies all of `num_drafts`, what trimming costs
        the longest chains, and, on the curve, less what the rows left out would take.
        """
        curve, whole = self._trimmed.seconds(n), self._times.seconds(n, context)

        def at(drafts: Any) -> Any:
            return np.interp(drafts, [*curve], [*curve.values()])

        price = at(self.depth) - self._times.seconds(n)[self.depth]
        return whole[num_drafts] + price + at(rows / n - 1) - at(num_drafts)
