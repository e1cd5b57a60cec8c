# SPDX-License-Identifier: Apache-2.0
"""Estimates how many drafts of each plan are accepted, by what was accepted lately.

- **Chains.** E(k) = 1 + a1 + a1 a2 + .. + a1 a2 .. ak, where ai is the probability that
  draft i is accepted if those before it are.
- **Runs.** Accepted drafts come in runs: text is easy for a while, then hard. Long
  drafts cover a run, and the next step begins after a rejection; shorter drafts begin
  more steps within runs. So rates that were observed with one length are too low for
  shorter drafts (by 7 to 9 % for length 3 when 8 are drafted) and too high for longer
  ones (by 15 % for 8 when 3 are). A second estimate counts the steps that another
  length would have begun in the same runs. It assumes that a token is predicted as
  well at any depth, so the larger of the two counts for lengths up to the mean
  drafted one, and the smaller for longer ones.
- **Trees.** The first nodes of a tree are the trees of fewer nodes, and it contains the
  likely part of the chain of best tokens: a verified tree shows what smaller ones and
  chains would have accepted. What more nodes gain is estimated separately.
- **Change.** Observations fade by time and by number, as long as there are new ones.
- **Kinds of requests.** The higher the temperature, the fewer drafts are accepted. Each
  kind has estimates of its own; a batch has the mean of its requests.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import log2
from operator import mul
from random import Random
from typing import NamedTuple

import numpy as np

from . import Faded

# Steps. Halved or doubled, the replay (`benchmarks/spec_decode/replay_auto.py`) changes
# by 0.1 %; doubled, a change of text is followed half as fast.
HALF_LIFE = 64
# Most drafts that count for a position, however many requests run. Halved or doubled,
# the replay changes by 0.15 %.
MAX_DRAFTS = 1024
# The prior, which counts as `PRIOR_DRAFTS` observed drafts or trees: acceptance rate of
# the first draft, and that of each later one relative to the one before.
PRIOR_ACCEPTANCE, PRIOR_DECLINE, PRIOR_DRAFTS = 0.7, 0.95, 4.0
# Highest temperatures of the first two kinds of requests; the third has all others.
TEMPERATURES = (0.0, 0.6)
NUM_KINDS = len(TEMPERATURES) + 1
MOST_RUNS = 4096  # requests whose runs are followed: a bound of memory

# Share of each kind among the requests that can use drafts: [NUM_KINDS], sum 1.
Shares = tuple[float, ...]
ALL_GREEDY: Shares = (1.0,) + (0.0,) * (NUM_KINDS - 1)
NONE_DRAFT: Shares = (0.0,) * NUM_KINDS
NO_TREES: Mapping[int, int] = {}


def kind_of(temperature: float) -> int:
    """The kind of a request, from 0 to `NUM_KINDS` - 1."""
    return bisect_left(TEMPERATURES, temperature)


class Verified(NamedTuple):
    """One request's verified drafts, of any plan.

    Attributes:
        num_drafts: of a chain, or nodes of a tree.
        accepted: numbers of the accepted nodes, ascending; of a chain 1, 2, ..
        num_best: how many of them precede the first one that is not the best token of
            its depth.
        unverified: for chains, acceptance probabilities of the drafts after them, if
            they were all accepted; these count with their expected outcomes.
        is_partial: whether the step verified only part of its drafts.
    """

    num_drafts: int
    accepted: Sequence[int]
    num_best: int
    unverified: Sequence[float] = ()
    is_partial: bool = False


class Outcome(NamedTuple):
    """What was accepted of one request's chain."""

    num_drafts: int
    num_accepted: int
    run: int | None  # tokens since a rejected draft; None: not followed


@lru_cache(maxsize=4096)
def _counted(outcome: Outcome, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """What an outcome adds to `ChainAcceptance`'s totals and weights, [2 K + 1].

    First K: accepted drafts by position, of those whose predecessors were accepted.
    Next K: tokens, of the steps that drafts of length 1, .., K would have taken for
    them. Last: drafts of a step.
    """
    total, weight = np.zeros((2, 2 * depth + 1))
    drafted, accepted, run = outcome
    weight[: min(accepted + 1, drafted)] = 1.0
    total[:accepted] = 1.0
    if drafted and run is not None:
        # Drafts of length k yield k + 1 tokens of a run per step, unless the run ends:
        # their steps begin at its tokens 0, k + 1, 2 (k + 1), ..
        per_step = np.arange(2, depth + 2)
        begun = (run + accepted) // per_step - (run - 1) // per_step
        total[depth:-1], weight[depth:-1] = accepted + 1.0, begun
        total[-1], weight[-1] = drafted, 1.0
    return total, weight


class ChainAcceptance:
    """Acceptance of chains of up to K drafts; all lengths share their observations."""

    def __init__(self, num_speculative_tokens: int):
        self.depth = num_speculative_tokens
        self._known = Faded(HALF_LIFE, MAX_DRAFTS)
        self._known.total, self._known.weight = self._nothing()
        self._new: Counter[Outcome] = Counter()
        self._unverified = self._nothing()  # expected outcomes, like `_counted`
        self._rates: list[float] | None = None  # cached until `_known` changes

    def _nothing(self) -> np.ndarray:
        return np.zeros((2, 2 * self.depth + 1))

    def observe(
        self,
        drafts: int,
        accepted: int,
        unverified: Sequence[float] = (),
        run: int | None = 0,
    ) -> None:
        """Records a request's drafts; for the last two see `Verified` and `Outcome`."""
        self._new[Outcome(drafts, accepted, run)] += 1
        probability = 1.0  # that a draft is reached
        for position, rate in enumerate(unverified, drafts):
            self._unverified[1, position] += probability
            probability *= rate
            self._unverified[0, position] += probability

    def end_steps(self, num_steps: int = 1) -> None:
        """Takes in the observations since the last call, of `num_steps` steps."""
        total, weight = self._unverified
        if not self._new and not weight.any():
            return  # what is known does not fade while nothing is drafted
        self._known.fade(num_steps)
        for outcome, number in self._new.items():
            more, reached = _counted(outcome, self.depth)
            total, weight = total + number * more, weight + number * reached
        self._known.total = self._known.total + total
        self._known.weight = self._known.weight + weight
        self._new.clear()
        self._unverified, self._rates = self._nothing(), None

    @property
    def is_known(self) -> bool:
        """Whether the observations outweigh the prior by far."""
        return self._known.weight[0] >= 8 * PRIOR_DRAFTS

    def rates(self) -> list[float]:
        """[K], probability that a draft is accepted if those before it are."""
        if self._rates is None:
            self._rates, guess = [], PRIOR_ACCEPTANCE
            counts = self._known.total[: self.depth], self._known.weight[: self.depth]
            for accepted, reached in zip(*(c.tolist() for c in counts), strict=True):
                rate = (accepted + PRIOR_DRAFTS * guess) / (reached + PRIOR_DRAFTS)
                self._rates.append(rate)
                guess = rate * PRIOR_DECLINE
        return self._rates

    def rate_behind(self, num_accepted: int) -> float:
        """Probability that one more draft would be accepted after `num_accepted`."""
        return self.rates()[min(num_accepted, self.depth - 1)]

    def expected_tokens(self) -> dict[int, float]:
        """Acceptance length (accepted drafts + 1) by length of the chain."""
        by_rates = [*accumulate(accumulate(self.rates(), mul), initial=1.0)]
        tokens = self._known.total[self.depth :].tolist()
        steps = self._known.weight[self.depth :].tolist()
        drafted, expected = tokens[-1] / max(steps[-1], PRIOR_DRAFTS), [1.0]
        for k, by_rate in enumerate(by_rates[1:], 1):
            of_runs = tokens[k - 1] + PRIOR_DRAFTS * by_rate
            of_runs /= steps[k - 1] + PRIOR_DRAFTS
            found = max(by_rate, of_runs) if k <= drafted else min(by_rate, of_runs)
            expected.append(max(found, expected[-1]))
        return dict(enumerate(expected))


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
        self.chains = ChainAcceptance(num_speculative_tokens)
        sizes, self._depths = sorted(trees), trees
        totals = [0.0, *map(tree_gain, sizes)]
        # By nodes: what the tree has accepted beyond the chain of its depth, less what
        # the next smaller tree has beyond its own. Not faded while no trees are seen.
        self._gains = {
            nodes: Faded(HALF_LIFE, MAX_DRAFTS, total - before, PRIOR_DRAFTS)
            for nodes, (before, total) in zip(sizes, pairwise(totals), strict=True)
        }
        self._seen: set[int] = set()  # the trees of the latest steps

    def observe(self, drafts: Verified, run: int | None = 0) -> None:
        """Records a request's drafts; `run` as in `Outcome`."""
        depth, of_smaller = self.depth(drafts.num_drafts), 0
        num_best = min(drafts.num_best, depth)
        self.chains.observe(depth, num_best, drafts.unverified, run)
        for nodes, gain in self._gains.items():
            if nodes > drafts.num_drafts:
                break
            depth = self._depths[nodes]
            accepted = min(bisect_right(drafts.accepted, nodes), depth)
            of_tree = accepted - min(num_best, depth)
            gain.add(of_tree - of_smaller)
            self._seen.add(nodes)
            of_smaller = of_tree

    def depth(self, num_drafts: int) -> int:
        """Depth of verified drafts, of which the last may have been left out."""
        if num_drafts <= self.num_speculative_tokens:
            return num_drafts
        depths = [d for nodes, d in self._depths.items() if nodes <= num_drafts]
        least = min(self._depths.values(), default=self.num_speculative_tokens)
        return max(depths, default=least)

    def end_steps(self, num_steps: int = 1) -> None:
        """Takes in the observations since the last call, of `num_steps` steps."""
        self.chains.end_steps(num_steps)
        for nodes in self._seen:
            self._gains[nodes].fade(num_steps)
        self._seen.clear()

    def expected_tokens(self) -> dict[int, float]:
        """Acceptance length (accepted drafts + 1) by plan."""
        expected, gained = self.chains.expected_tokens(), 0.0
        for nodes, gain in self._gains.items():
            gained += gain.mean
            expected[nodes] = expected[self._depths[nodes]] + gained
        return expected


def tree_gain(nodes: int) -> float:
    """Initial guess of the nodes that a tree has accepted beyond a chain as deep.

    With PARD on held-out text sampled at temperature 0.5 trees gain 0.4, 0.7, 1.0 and
    1.2 with 7, 15, 31 and 63 nodes; with an EAGLE-3 head as much.
    """
    return 0.28 * log2(nodes + 1) - 0.49


class Acceptance:
    """A `PlanAcceptance` for each kind of request; its arguments."""

    def __init__(
        self, num_speculative_tokens: int, trees: Mapping[int, int] = NO_TREES
    ):
        self._of = [
            PlanAcceptance(num_speculative_tokens, trees) for _ in range(NUM_KINDS)
        ]
        self._runs: dict[str, int] = {}  # by request, tokens since a rejected draft
        self._random = Random(0)

    def _present(self, shares: Shares) -> Iterator[tuple[float, PlanAcceptance]]:
        pairs = zip(shares, self._of, strict=True)
        return ((share, of_kind) for share, of_kind in pairs if share)

    def chains(self, shares: Shares) -> list[ChainAcceptance]:
        """The estimates of the kinds in a batch."""
        return [of_kind.chains for _, of_kind in self._present(shares)]

    def observe(self, drafts: Verified, kind: int = 0, request_id: str = "") -> None:
        """Records a request's drafts."""
        run, of_kind = self._runs.pop(request_id, 0), self._of[kind]
        of_kind.observe(drafts, None if drafts.is_partial else run)
        num_best, depth = drafts.num_best, of_kind.depth(drafts.num_drafts)
        if drafts.is_partial or not num_best == len(drafts.accepted) == depth > 0:
            return
        # The bonus token was not compared with a draft. The run goes on as often as one
        # more draft would have been accepted.
        if self._random.random() < of_kind.chains.rate_behind(num_best):
            if len(self._runs) >= MOST_RUNS:  # mostly of requests that have ended
                self._runs.clear()
            self._runs[request_id] = run + num_best + 1

    def end_run(self, request_id: str) -> None:
        """To be called if a step of a request is not observed."""
        self._runs.pop(request_id, None)

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
            [share * each for each in accumulate(of_kind.chains.rates(), mul)]
            for share, of_kind in self._present(shares)
        ]
        of_all = [1.0, *map(sum, zip(*reached, strict=True))]
        return [probability / before for before, probability in pairwise(of_all)]
