# SPDX-License-Identifier: Apache-2.0
"""Estimates acceptance while serving.

How many drafts are accepted depends on text and temperature, which change with the
requests. So older observations fade, and are dropped at once if newer ones contradict
them.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import log, log2
from operator import mul
from typing import NamedTuple

import numpy as np

HALF_LIFE = 512  # steps after which an observation counts half
MAX_DRAFTS = 1024  # most drafts that count per position, however many requests run
# The prior, which counts as much as `PRIOR_DRAFTS` observed drafts: acceptance rate of
# the first draft, and that of each later one relative to the one before.
PRIOR_ACCEPTANCE = 0.7
PRIOR_DECLINE = 0.95
PRIOR_DRAFTS = 4.0
# A block of so many consecutive drafts is compared with all earlier ones. It
# contradicts them if its outcomes are exp(CONTRADICTION) times as likely under its own
# rates as under the known ones; the exponent grows by one per position, since each
# position adds a rate that is fitted to the block.
BLOCK_DRAFTS = 32
CONTRADICTION = 6.0
TREE_HALF_LIFE = 128  # steps after which an observed gain of a tree counts half
LEAST_TREES = 16.0  # verified trees that the initial guess, or a faded mean, counts as
NO_TREES: Mapping[int, int] = {}
# Share of what chains are seen to accept within trees that they do not accept alone: a
# chain's next step begins right after its miss, where the next token is hard to predict
# too, but a tree has often accepted another token there. With the bundled drafters it
# is 0.02 to 0.09.
LOST_ALONE = 0.06


class Verified(NamedTuple):
    """One request's verified drafts, of any plan.

    Attributes:
        num_drafts: of a chain, or nodes of a tree.
        accepted: numbers of the accepted nodes, ascending; of a chain 1, 2, ..
        num_best: how many of them precede the first one that is not the best token of
            its depth.
        unverified: for chains, probabilities of the drafts after them, if they were all
            accepted.
    """

    num_drafts: int
    accepted: Sequence[int]
    num_best: int
    unverified: Sequence[float] = ()


class Outcome(NamedTuple):
    """What was accepted of one request's drafts in one step."""

    num_drafts: int
    num_accepted: int
    # Tokens of the request's present run before this step, see `ChainAcceptance`; None:
    # the step does not count in estimates by runs.
    run: int | None


class _Counts:
    """Faded counts of drafts by position, and of steps by draft length.

    Attributes:
        all: [3, K + 1] float64, everything below.
        reached: [K], drafts of each position whose predecessors were all accepted.
        accepted: [K], those of them that were accepted.
        steps_of: [K], steps that drafts of length 1, .., K would have taken for the
            same tokens.
        totals: [3], steps with verified drafts, counted once per request; draft tokens
            verified in these steps; tokens that these steps yielded.
    """

    def __init__(self, num_positions: int):
        self.all = np.zeros((3, num_positions + 1))
        self.reached, self.accepted, self.steps_of = self.all[:, :-1]
        self.totals = self.all[:, -1]

    def add(self, outcomes: dict[Outcome, int]) -> None:
        depth = len(self.reached)
        for outcome, number in outcomes.items():
            self.all += number * _counted(outcome, depth)

    def fade(self, num_steps: int) -> None:
        seen, faded = np.empty_like(self.all), 0.5 ** (num_steps / HALF_LIFE)
        seen[:2], seen[2], seen[:, -1] = self.all[0], self.totals[0], self.totals[0]
        self.all *= MAX_DRAFTS / np.maximum(seen, MAX_DRAFTS) * faded


@lru_cache(maxsize=4096)
def _counted(outcome: Outcome, depth: int) -> np.ndarray:
    """What one outcome adds to the counts, as `_Counts.all`."""
    counts = _Counts(depth)
    drafted, accepted, run = outcome
    counts.reached[: min(accepted + 1, drafted)] = 1.0
    counts.accepted[:accepted] = 1.0
    if drafted and run is not None:
        counts.totals[:] = 1.0, drafted, accepted + 1.0
        # Drafts of length k yield k + 1 tokens of a run per step, unless the run ends:
        # their steps begin at its tokens 0, k + 1, 2 (k + 1), ..
        per_step = np.arange(2, depth + 2)
        counts.steps_of[:] = (run + accepted) // per_step - (run - 1) // per_step
    return counts.all


class ChainAcceptance:
    """Acceptance of chains of up to K drafts; all lengths share their observations.

    **Fading.** Older observations count less by time (`HALF_LIFE`), and in large
    batches by number (`MAX_DRAFTS`), so that both a lone request and a full batch adapt
    within seconds. By fading alone, a lone request would follow a change of load only
    after some hundred steps; a likelihood-ratio test of blocks of drafts (CUSUM with a
    window, Page 1954) finds a large change within one block or two.

    **Trimmed steps** verify only the most likely drafts of a batch; the others would be
    accepted less often. Counting only verified drafts, the more likely half of all
    drafts seems to yield a third more tokens. So a draft that follows verified ones
    counts with the probability that the drafter gave it.

    **Runs.** Accepted drafts come in runs: text is easy for a while, then hard. A long
    draft covers a run, and the next step begins after a rejection. Shorter drafts begin
    more steps within runs, and more of theirs are accepted. So acceptance rates that
    were observed with drafts of one length underestimate shorter drafts (of the bundled
    drafters, those of length 8 underestimate length 3 by 7 to 9 %) and overestimate
    longer ones (those of length 3 overestimate length 8 by 15 %). A second estimate
    counts the steps that drafts of another length would have begun in the same runs. It
    is within 1 to 2 % in both directions for autoregressive drafters, and within 4 %
    for parallel ones that draft three tokens or more. But it assumes that the drafter
    predicts a token as well at any depth; if drafts get much worse with depth, the
    rates are right. So the larger of the two estimates is taken for lengths up to the
    mean drafted one, and the smaller for longer ones.
    """

    def __init__(self, num_speculative_tokens: int):
        self._known = _Counts(num_speculative_tokens)
        self._block = _Counts(num_speculative_tokens)
        self._new: dict[Outcome, int] = {}
        # Expected outcomes of the step's unverified drafts, by index of `_Counts.all`.
        self._behind: defaultdict[tuple[int, int], float] = defaultdict(float)
        self._rates: list[float] | None = None  # cached until `_known` changes

    def observe(
        self,
        num_drafts: int,
        num_accepted: int,
        unverified: Sequence[float] = (),
        run: int | None = 0,
    ) -> None:
        """Records one request's verified drafts.

        Args:
            unverified: probabilities of the drafts after them, if they were all
                accepted: these count with their expected outcomes.
            run: tokens of the request since its last rejected draft; None in trimmed
                steps, which do not count in estimates by runs.
        """
        outcome = Outcome(num_drafts, num_accepted, run)
        self._new[outcome] = self._new.get(outcome, 0) + 1
        chance = 1.0  # that a draft is reached; arrays would be slower for so few
        for position, rate in enumerate(unverified, num_drafts):
            self._behind[0, position] += chance
            chance *= rate
            self._behind[1, position] += chance

    def end_steps(self, num_steps: int = 1) -> None:
        """Takes in the observations since the last call, of `num_steps` steps."""
        self._known.fade(num_steps)
        self._rates = None
        if self._block_is_full():
            self.begin_block()
        new = _Counts(len(self._known.reached))
        self._add_new(new)
        self._block.all += new.all
        if self._block_is_full() and self._contradicts():
            self.believe_block()
        else:
            self._known.all += new.all
        self._new.clear()
        self._behind.clear()
        self._rates = None

    def _block_is_full(self) -> bool:
        return self._block.reached[0] >= BLOCK_DRAFTS

    @property
    def is_known(self) -> bool:
        """Whether the observations outweigh the prior by far."""
        return self._known.reached[0] >= BLOCK_DRAFTS

    def begin_block(self) -> None:
        """Starts a block, which is to be compared with all drafts before it."""
        self._block = _Counts(len(self._known.reached))

    def believe_block(self) -> None:
        """Drops all observations from before the present block, if it has any."""
        if self._block.reached[0]:
            self._known, self._rates = self._block, None
            self.begin_block()

    def _add_new(self, counts: _Counts) -> None:
        counts.add(self._new)
        for place, number in self._behind.items():
            counts.all[place] += number

    def _contradicts(self) -> bool:
        """Whether the block's outcomes are far more likely under other rates."""
        gain, positions = 0.0, 0
        counts = zip(*self._block.all[:2, :-1].tolist(), strict=True)
        for known, (reached, accepted) in zip(self.rates(), counts, strict=True):
            positions += reached > 0
            for number, rate in (
                (accepted, known),
                (reached - accepted, 1 - known),
            ):
                if number:
                    gain += number * log(number / (reached * rate))
        return gain > CONTRADICTION + positions

    def rates(self) -> list[float]:
        """[K], probability that a draft is accepted if those before it are."""
        if self._rates is None:
            self._rates = self._estimate_rates()
        return self._rates

    def _estimate_rates(self) -> list[float]:
        rates, guess = [], PRIOR_ACCEPTANCE
        counts = zip(*self._known.all[:2, :-1].tolist(), strict=True)
        for reached, accepted in counts:
            rate = (accepted + PRIOR_DRAFTS * guess) / (reached + PRIOR_DRAFTS)
            rates.append(rate)
            guess = rate * PRIOR_DECLINE
        return rates

    def rate_behind(self, num_accepted: int) -> float:
        """Probability that one more draft would be accepted after `num_accepted`."""
        rates = self.rates()
        return rates[min(num_accepted, len(rates) - 1)]

    def expected_tokens(self) -> dict[int, float]:
        """Acceptance length (accepted drafts + 1) by length of the chain."""
        by_rates = [*accumulate(accumulate(self.rates(), mul), initial=1.0)]
        num_steps, num_drafts, num_tokens = self._known.totals.tolist()
        steps_of, expected = self._known.steps_of.tolist(), [1.0]
        drafted = num_drafts / max(num_steps, PRIOR_DRAFTS)
        for k, tokens in enumerate(by_rates[1:], 1):
            of_runs = num_tokens + PRIOR_DRAFTS * tokens
            of_runs /= steps_of[k - 1] + PRIOR_DRAFTS
            tokens = max(tokens, of_runs) if k <= drafted else min(tokens, of_runs)
            expected.append(max(tokens, expected[-1]))
        return dict(enumerate(expected))


class _Gain:
    """Mean number of nodes that a tree has accepted beyond the chain of its depth, less
    what the next smaller tree has beyond its own."""

    def __init__(self, guess: float):
        self.value = guess
        self._seen = LEAST_TREES

    def add(self, num_accepted: int) -> None:
        self._seen += 1
        self.value += (num_accepted - self.value) / self._seen

    def fade(self, num_steps: int) -> None:
        faded = self._seen * 0.5 ** (num_steps / TREE_HALF_LIFE)
        self._seen = max(faded, LEAST_TREES)


class PlanAcceptance:
    """Acceptance of every plan of a step: chains by length, trees by number of nodes.

    The first nodes of a tree are the trees of fewer nodes, and it contains the likely
    part of the chain of best tokens. So a verified tree shows what smaller trees and
    chains would have accepted; see `AcceptedNodes`. (A smaller tree of less depth has
    siblings instead of the deeper nodes, so this shows a little less.) What the further
    nodes of a larger tree gain depends far less on drafter and text than what chains
    gain, and is estimated separately.

    Args:
        num_speculative_tokens: K, the longest chain.
        trees: nodes of the trees, and their depths; larger trees are as deep or deeper.
    """

    def __init__(
        self, num_speculative_tokens: int, trees: Mapping[int, int] = NO_TREES
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self.chains = ChainAcceptance(num_speculative_tokens)
        self._trees = self._drafts = 0.0  # observed, faded as those of chains are
        sizes, self._depths = sorted(trees), trees
        is_one_pass = min(trees.values(), default=0) == num_speculative_tokens
        totals = [0.0, *(tree_gain(nodes, is_one_pass) for nodes in sizes)]
        self._gains = {  # from the smallest tree to the largest
            nodes: _Gain(total - before)
            for nodes, (before, total) in zip(sizes, pairwise(totals), strict=True)
        }

    def observe(self, drafts: Verified, run: int | None = 0) -> None:
        """Records a request's drafts; for `run` see `ChainAcceptance.observe`."""
        num_drafts, accepted, num_best, unverified = drafts
        depth, of_smaller = self.depth(num_drafts), 0
        self._drafts += 1
        self._trees += num_drafts > self.num_speculative_tokens
        self.chains.observe(depth, min(num_best, depth), unverified, run)
        for nodes, gain in self._gains.items():
            if nodes > num_drafts:
                break
            depth = self._depths[nodes]
            of_tree = min(bisect_right(accepted, nodes), depth) - min(num_best, depth)
            gain.add(of_tree - of_smaller)
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
        kept = MAX_DRAFTS / max(self._drafts, MAX_DRAFTS)
        kept *= 0.5 ** (num_steps / HALF_LIFE)
        self._trees, self._drafts = self._trees * kept, self._drafts * kept
        for gain in self._gains.values():
            gain.fade(num_steps)

    def expected_tokens(self) -> dict[int, float]:
        """Acceptance length (accepted drafts + 1) by plan."""
        observed, gained = self.chains.expected_tokens(), 0.0
        if not self._gains:
            return observed
        alone = 1.0 - self._trees / max(self._drafts, 1.0)  # share of chains
        # What was observed is between the two.
        within = {
            k: (n - 1.0) / (1.0 - LOST_ALONE * alone) for k, n in observed.items()
        }
        expected = {k: 1.0 + (1.0 - LOST_ALONE) * n for k, n in within.items()}
        for nodes, gain in self._gains.items():
            gained += gain.value
            expected[nodes] = 1.0 + within[self._depths[nodes]] + gained
        return expected


def tree_gain(nodes: int, is_one_pass: bool = True) -> float:
    """Initial guess of the nodes that a tree has accepted beyond a chain as deep.

    With PARD on held-out text sampled at temperature 0.5, of which chains have 2.1
    drafts accepted, trees gain 0.4, 0.7, 1.0 and 1.2 with 7, 15, 31 and 63 nodes. They
    gain a tenth less on greedy text (chains: 4.5), and a quarter less at temperature
    0.8 (chains: 0.9). Chains with siblings gain 0.1 less.
    """
    return 0.28 * log2(nodes + 1) - (0.49 if is_one_pass else 0.59)
