# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, learnt as requests are served. Pure Python.

What a draft is worth depends on the text and on the temperature, which change with the
requests. So older steps fade, and are forgotten at once where newer ones contradict
them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import log, log2
from operator import mul

HALF_LIFE = 512  # steps after which what was seen counts half
MAX_DRAFTS = 1024  # of a position, however many requests there are
# Before anything is seen, and where little is: the first draft is accepted so often,
# each later one a little less often than the one before, as if seen on so many drafts.
PRIOR_ACCEPTANCE = 0.7
PRIOR_DECLINE = 0.95
PRIOR_DRAFTS = 4.0
# So many drafts in a row are held against all before. They contradict it where they are
# exp(CONTRADICTION) times as likely by their own rates as by the known ones; each
# position adds a rate that is fitted to them, and so one to the exponent.
BLOCK_DRAFTS = 32
CONTRADICTION = 6.0
TREE_HALF_LIFE = 128  # steps after which what was seen of a tree's gain counts half
LEAST_TREES = 16.0  # requests and steps that a guess counts, and what was seen long ago


class _Counts:
    """How often each position was drafted with all before accepted, and accepted."""

    def __init__(self, num_positions: int):
        self.reached = [0.0] * num_positions
        self.accepted = [0.0] * num_positions

    def add(self, outcomes: Counter[tuple[int, int]]) -> None:
        for (drafted, accepted), count in outcomes.items():
            for i in range(min(accepted + 1, drafted)):
                self.reached[i] += count
            for i in range(accepted):
                self.accepted[i] += count

    def expect(self, first: int, chances: Sequence[float]) -> None:
        """Adds drafts that would have been verified next, by their chances.

        Args:
            first: position of the first of them; all before it was accepted.
            chances: [at most to the last position] that each is accepted after those
                before it.
        """
        reached = 1.0
        for i, chance in enumerate(chances, first):
            self.reached[i] += reached
            reached *= float(chance)
            self.accepted[i] += reached

    def fade(self) -> None:
        keep = 0.5 ** (1 / HALF_LIFE)
        for i, reached in enumerate(self.reached):
            share = keep * min(1.0, MAX_DRAFTS / max(reached, 1.0))
            self.reached[i] *= share
            self.accepted[i] *= share


class ChainAcceptance:
    """Of chains of up to K drafts: all share what is known of each position.

    Older steps count less by time (`HALF_LIFE`), and in large batches by number
    (`MAX_DRAFTS`), so that both a lone request and a full batch adapt within seconds.
    After a change of load, that would be some hundred steps for a lone request; the
    likelihood-ratio test of blocks of drafts (CUSUM with a window, Page 1954) finds a
    large one within one block or two.

    Where a batch's likeliest drafts alone are verified, those that are not would be
    accepted less often: half of all drafts, the likelier ones, seem to yield a third
    more tokens. So a draft behind verified ones counts with the chance it was given.
    """

    def __init__(self, num_speculative_tokens: int):
        self._known = _Counts(num_speculative_tokens)
        self._block = _Counts(num_speculative_tokens)
        self._new: Counter[tuple[int, int]] = Counter()
        self._unverified: list[tuple[int, Sequence[float]]] = []

    def observe(
        self, num_drafts: int, num_accepted: int, unverified: Sequence[float] = ()
    ) -> None:
        """Takes in one request's verified drafts.

        Args:
            unverified: chances of drafts behind them, if all of them were accepted.
        """
        self._new[num_drafts, num_accepted] += 1
        if len(unverified):
            self._unverified.append((num_drafts, unverified))

    def end_step(self) -> None:
        """What was observed is of one step, which is over."""
        self._known.fade()
        if self._block_is_full():
            self.begin_block()
        self._add_new(self._block)
        if self._block_is_full() and self._contradicts():
            self.believe_block()
        else:
            self._add_new(self._known)
        self._new.clear()
        self._unverified.clear()

    def _block_is_full(self) -> bool:
        return self._block.reached[0] >= BLOCK_DRAFTS

    def begin_block(self) -> None:
        """The drafts from now on are held against those before."""
        self._block = _Counts(len(self._known.reached))

    def believe_block(self) -> None:
        """Forgets what was known before the present block."""
        self._known = self._block
        self.begin_block()

    def _add_new(self, counts: _Counts) -> None:
        counts.add(self._new)
        for first, chances in self._unverified:
            counts.expect(first, chances)

    def _contradicts(self) -> bool:
        """Whether the block's drafts are of another kind than those known."""
        gain, positions = 0.0, 0
        counts = zip(self._block.reached, self._block.accepted, strict=True)
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
        """Probability that a draft is accepted if those before it were: [K]."""
        rates, guess = [], PRIOR_ACCEPTANCE
        counts = zip(self._known.reached, self._known.accepted, strict=True)
        for reached, accepted in counts:
            rate = (accepted + PRIOR_DRAFTS * guess) / (reached + PRIOR_DRAFTS)
            rates.append(rate)
            guess = rate * PRIOR_DECLINE
        return rates

    def expected_tokens(self) -> dict[int, float]:
        """Tokens of a request and step, drafts and one more, by the chain's length."""
        tokens = accumulate(accumulate(self.rates(), mul), initial=1.0)
        return dict(enumerate(tokens))


class _Gain:
    """Accepted drafts of a tree beyond those of the next smaller plan, on average."""

    def __init__(self, guess: float):
        self.value = guess
        self._seen = LEAST_TREES

    def add(self, num_accepted: int) -> None:
        self._seen += 1
        self.value += (num_accepted - self.value) / self._seen

    def fade(self) -> None:
        self._seen = max(self._seen * 0.5 ** (1 / TREE_HALF_LIFE), LEAST_TREES)


class PlanAcceptance:
    """Of every plan that a step can follow: chains, and trees by their nodes.

    A tree begins with every tree of fewer nodes, and holds the likely part of the chain
    of best tokens. So a verified tree tells what smaller trees and chains would have
    accepted; see `AcceptedNodes`. What the further nodes of a larger plan gain depends
    on drafter and text far less than what chains gain, and is learnt apart.

    Args:
        num_speculative_tokens: K, the longest chain.
        trees: nodes of the trees.
    """

    def __init__(self, num_speculative_tokens: int, trees: Iterable[int] = ()):
        self.num_speculative_tokens = num_speculative_tokens
        self.chains = ChainAcceptance(num_speculative_tokens)
        sizes = sorted(trees)
        totals = [0.0, *map(tree_gain, sizes)]
        self._gains = {  # from the smallest tree to the largest
            nodes: _Gain(total - before)
            for nodes, (before, total) in zip(sizes, pairwise(totals), strict=True)
        }

    def observe(
        self,
        num_drafts: int,
        accepted: Sequence[int],
        num_best: int,
        unverified: Sequence[float] = (),
    ) -> None:
        """Takes in one request's verified drafts, of whatever plan.

        Args:
            accepted: numbers of the accepted ones, ascending; of a chain 1, 2, ..
            num_best: of them, those before the first that is not its depth's best.
            unverified: of a chain, see `ChainAcceptance.observe`.
        """
        of_smaller, depth = num_best, self.num_speculative_tokens
        self.chains.observe(min(num_drafts, depth), num_best, unverified)
        for nodes, gain in self._gains.items():
            if nodes > num_drafts:
                break
            of_tree = bisect_right(accepted, nodes)
            gain.add(of_tree - of_smaller)
            of_smaller = of_tree

    def end_step(self) -> None:
        """What was observed is of one step, which is over."""
        self.chains.end_step()
        for gain in self._gains.values():
            gain.fade()

    def expected_tokens(self) -> dict[int, float]:
        """Tokens of a request and step, drafts and one more, by drafts per request."""
        expected = self.chains.expected_tokens()
        tokens = expected[self.num_speculative_tokens]
        for nodes, gain in self._gains.items():
            tokens += gain.value
            expected[nodes] = tokens
        return expected


def tree_gain(nodes: int) -> float:
    """Accepted drafts of a tree beyond those of the longest chain, before any is seen.

    Of PARD on held-out text: 0.4, 0.7, 1.0 and 1.2 with 7, 15, 31 and 63 nodes, of text
    sampled at temperature 0.5, where chains accept 2.1 drafts; a tenth less of greedy
    text, where they accept 4.5, and a quarter less at 0.8, where they accept 0.9.
    """
    return 0.28 * log2(nodes + 1) - 0.49
