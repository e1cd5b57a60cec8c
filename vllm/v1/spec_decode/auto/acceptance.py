# SPDX-License-Identifier: Apache-2.0
"""Estimates how many drafts of each plan are accepted, by what was accepted lately.

- **Chains.** E(k) = 1 + a1 + a1 a2 + .. + a1 a2 .. ak, where ai is the probability that
  draft i is accepted if those before it are. All lengths share their observations.
- **Trees.** The first nodes of a tree are the trees of fewer nodes, and it contains the
  likely part of the chain of best tokens: a verified tree shows what smaller ones and
  chains would have accepted. What more nodes gain is estimated separately.
- **Change.** Observations fade by time and by number, as long as there are new ones.
- **Kinds of requests.** The higher the temperature, the fewer drafts are accepted. Each
  kind has estimates of its own; a batch has the mean of its requests.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import log2
from operator import mul
from typing import Any, NamedTuple

import numpy as np

# Steps. Halved or doubled, a replay of recorded steps changes by 0.1 % (`git show
# b415c8e7:benchmarks/spec_decode/replay_auto.py`); doubled, a change of text is
# followed half as fast.
HALF_LIFE = 64
# So many drafts of a position, or more, fade earlier ones as a step does. Doubled, a
# change of text in large batches is followed half as fast.
DRAFTS_PER_STEP = 10
# The prior, which counts as `PRIOR_DRAFTS` observed drafts or trees: acceptance rate of
# the first draft; that of a later one is as of the one before. Each halved or doubled,
# or at most 0.9, the replay changes by less than 0.2 %.
PRIOR_ACCEPTANCE, PRIOR_DRAFTS = 0.7, 4.0
# Highest temperatures of the first two kinds of requests; the third has all others.
# With one kind for all, the replay loses 5 % where texts alternate at 64 requests.
TEMPERATURES = (0.0, 0.6)
NUM_KINDS = len(TEMPERATURES) + 1

# Share of each kind among the requests that can use drafts: [NUM_KINDS], sum 1.
Shares = tuple[float, ...]
ALL_GREEDY: Shares = (1.0,) + (0.0,) * (NUM_KINDS - 1)
NONE_DRAFT: Shares = (0.0,) * NUM_KINDS
NO_TREES: Mapping[int, int] = {}


def kind_of(temperature: float) -> int:
    """The kind of a request, from 0 to `NUM_KINDS` - 1."""
    return bisect_left(TEMPERATURES, temperature)


class Faded:
    """A mean of which older observations count less.

    Attributes:
        total, weight: the sum of the observations, and their number. Both may be arrays
            of one shape: a mean for each element.

    Args:
        half_life: amount of `fade` (steps, drafts, seconds) after which an observation
            counts half.
        prior: the mean without observations, which counts as `prior_weight` of them.
    """

    def __init__(self, half_life: float, prior: float = 0.0, prior_weight: float = 0.0):
        self.half_life = half_life
        self.prior, self.prior_weight = prior, prior_weight
        self.total: Any = 0.0
        self.weight: Any = 0.0

    def fade(self, amount: float = 1.0) -> None:
        kept = 0.5 ** (amount / self.half_life)
        self.total, self.weight = self.total * kept, self.weight * kept

    def add(self, total: Any, weight: Any = 1.0) -> None:
        """Adds observations: their sum, and their number."""
        self.total, self.weight = self.total + total, self.weight + weight

    @property
    def mean(self) -> Any:
        total = self.total + self.prior * self.prior_weight
        return total / (self.weight + self.prior_weight)


class Verified(NamedTuple):
    """One request's verified drafts, of any plan.

    Attributes:
        num_drafts: of a chain, or nodes of a tree.
        accepted: numbers of the accepted nodes, ascending; of a chain 1, 2, ..
        num_best: how many of them precede the first one that is not the best token of
            its depth.
        unverified: for chains, acceptance probabilities of the drafts after them, if
            they were all accepted; these count with their expected outcomes.
    """

    num_drafts: int
    accepted: Sequence[int]
    num_best: int
    unverified: Sequence[float] = ()


class PlanAcceptance:
    """Acceptance of chains by length, and of trees by number of nodes.

    Args:
        num_speculative_tokens: K, the longest chain.
        trees: nodes of the trees, and their depths; larger trees are as deep or deeper.
    """

    def __init__(
        self, num_speculative_tokens: int, trees: Mapping[int, int] = NO_TREES
    ):
        self.num_speculative_tokens = num_speculative_tokens
        # By position: accepted drafts, of those whose predecessors were accepted.
        self._chains = Faded(HALF_LIFE)
        self._chains.add(*np.zeros((2, num_speculative_tokens)))
        # The same of the latest steps, as lists, which are faster in small pieces.
        self._new = [[0.0] * num_speculative_tokens for _ in range(2)]
        sizes, self._depths = sorted(trees), trees
        totals = [0.0, *map(tree_gain, sizes)]
        # By nodes: what the tree has accepted beyond the chain of its depth, less what
        # the next smaller tree has beyond its own. Not faded while no trees are seen.
        self._gains = {
            nodes: Faded(HALF_LIFE, total - before, PRIOR_DRAFTS)
            for nodes, (before, total) in zip(sizes, pairwise(totals), strict=True)
        }
        self._seen: set[int] = set()  # the trees of the latest steps

    def observe(self, drafts: Verified) -> None:
        """Records a request's drafts."""
        depth, of_smaller = self._depth(drafts.num_drafts), 0
        num_best = min(drafts.num_best, depth)
        accepted, reached = self._new
        for position in range(min(num_best + 1, depth)):
            accepted[position] += position < num_best
            reached[position] += 1.0
        probability = 1.0  # that a draft is reached
        for position, rate in enumerate(drafts.unverified, depth):
            reached[position] += probability
            probability *= rate
            accepted[position] += probability
        for nodes, gain in self._gains.items():
            if nodes > drafts.num_drafts:
                break
            depth = self._depths[nodes]
            found = min(bisect_right(drafts.accepted, nodes), depth)
            of_tree = found - min(num_best, depth)
            gain.add(of_tree - of_smaller)
            self._seen.add(nodes)
            of_smaller = of_tree

    def _depth(self, num_drafts: int) -> int:
        """Depth of verified drafts, of which the last may have been left out."""
        if num_drafts <= self.num_speculative_tokens:
            return num_drafts
        depths = [d for nodes, d in self._depths.items() if nodes <= num_drafts]
        least = min(self._depths.values(), default=self.num_speculative_tokens)
        return max(depths, default=least)

    def end_steps(self, num_steps: int = 1) -> None:
        """Takes in the observations since the last call, of `num_steps` steps."""
        accepted, reached = self._new
        if any(reached):  # else nothing is drafted, and nothing fades
            self._chains.fade(max(num_steps, reached[0] / DRAFTS_PER_STEP))
            self._chains.add(accepted, reached)
            self._new = [[0.0] * len(reached) for _ in range(2)]
        for nodes in self._seen:
            self._gains[nodes].fade(num_steps)
        self._seen.clear()

    def rates(self) -> list[float]:
        """[K], probability that a draft is accepted if those before it are."""
        rates, rate = [], PRIOR_ACCEPTANCE
        counts = self._chains.total.tolist(), self._chains.weight.tolist()
        for accepted, reached in zip(*counts, strict=True):
            rate = (accepted + PRIOR_DRAFTS * rate) / (reached + PRIOR_DRAFTS)
            rates.append(rate)
        return rates

    def expected_tokens(self) -> dict[int, float]:
        """Acceptance length (accepted drafts + 1) by plan."""
        lengths = accumulate(accumulate(self.rates(), mul), initial=1.0)
        expected, gained = dict(enumerate(lengths)), 0.0
        for nodes, gain in self._gains.items():
            gained += gain.mean
            expected[nodes] = expected[self._depths[nodes]] + gained
        return expected


def tree_gain(nodes: int) -> float:
    """Initial guess of the nodes that a tree has accepted beyond a chain as deep.

    With PARD on held-out text sampled at temperature 0.5 trees gain 0.4, 0.7, 1.0 and
    1.2 with 7, 15, 31 and 63 nodes; with an EAGLE-3 head as much. Halved, the replay
    loses 0.4 %, and without this guess 2.4 %; doubled, it gains 0.2 %.
    """
    return 0.28 * log2(nodes + 1) - 0.49


class Acceptance:
    """A `PlanAcceptance` for each kind of request; its arguments."""

    def __init__(
        self, num_speculative_tokens: int, trees: Mapping[int, int] = NO_TREES
    ):
        plans = num_speculative_tokens, trees
        self._of = [PlanAcceptance(*plans) for _ in range(NUM_KINDS)]

    def _present(self, shares: Shares) -> Iterator[tuple[float, PlanAcceptance]]:
        pairs = zip(shares, self._of, strict=True)
        return ((share, of_kind) for share, of_kind in pairs if share)

    def observe(self, drafts: Verified, kind: int = 0) -> None:
        """Records a request's drafts."""
        self._of[kind].observe(drafts)

    def end_steps(self, shares: Shares, num_steps: int = 1) -> None:
        """Takes in the observations of `num_steps` steps. Those of kinds that were not
        in them do not fade."""
        for _, of_kind in self._present(shares):
            of_kind.end_steps(num_steps)

    def expected_tokens(self, shares: Shares = ALL_GREEDY) -> dict[int, float]:
        """Mean acceptance length (accepted drafts + 1) by plan."""
        found: dict[int, float] = {}
        for share, of_kind in self._present(shares):
            for plan, tokens in of_kind.expected_tokens().items():
                found[plan] = found.get(plan, 0.0) + share * tokens
        return found

    def rates(self, shares: Shares) -> list[float]:
        """[K], probability that a draft is accepted if those before it are."""
        reached = [
            [share * each for each in accumulate(of_kind.rates(), mul)]
            for share, of_kind in self._present(shares)
        ]
        of_all = [1.0, *map(sum, zip(*reached, strict=True))]
        return [probability / before for before, probability in pairwise(of_all)]
