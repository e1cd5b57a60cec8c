# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, learnt as requests are served. Pure Python.

What a draft is worth depends on the text and on the temperature, which change with the
requests. So older steps fade, and are forgotten at once where newer ones contradict
them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import log, log2
from operator import mul
from typing import NamedTuple

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


class Outcome(NamedTuple):
    """Of one request's verified drafts."""

    num_drafts: int
    num_accepted: int
    # Tokens of the request's run of accepted drafts before them; None: not to count.
    run: int | None


class _Counts:
    """How often each position was drafted with all before accepted, and accepted; and
    how many steps drafts of each length would have taken for the same tokens.

    Attributes:
        reached: [K]
        accepted: [K]
        num_steps: of requests.
        num_drafts: of all of them.
        num_tokens: that they yielded.
        steps_of: [K], how many steps it would have been, by draft length.
    """

    def __init__(self, num_positions: int):
        self.reached = [0.0] * num_positions
        self.accepted = [0.0] * num_positions
        self.num_steps = self.num_drafts = self.num_tokens = 0.0
        self.steps_of = [0.0] * num_positions

    def add(self, outcomes: Counter[Outcome]) -> None:
        for (drafted, accepted, run), count in outcomes.items():
            for i in range(min(accepted + 1, drafted)):
                self.reached[i] += count
            for i in range(accepted):
                self.accepted[i] += count
            if run is None or not drafted:
                continue
            self.num_steps += count
            self.num_drafts += count * drafted
            self.num_tokens += count * (accepted + 1)
            steps = _steps_of(run, accepted + 1, len(self.steps_of))
            for i, num_steps in enumerate(steps):
                self.steps_of[i] += count * num_steps

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
        share = keep * min(1.0, MAX_DRAFTS / max(self.num_steps, 1.0))
        self.num_steps *= share
        self.num_drafts *= share
        self.num_tokens *= share
        self.steps_of = [share * num_steps for num_steps in self.steps_of]


@lru_cache(maxsize=4096)
def _steps_of(run: int, num_tokens: int, depth: int) -> tuple[int, ...]:
    """Steps that begin in a part of a run, by draft length up to `depth`.

    Args:
        run: tokens of the run before that part.
        num_tokens: of that part.
    """
    end = run + num_tokens - 1
    return tuple(end // k - (run - 1) // k for k in range(2, depth + 2))


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

    Accepted drafts come in runs: text is easy for a while, then hard. A step with long
    drafts covers a run and the next begins behind a rejection; shorter drafts begin
    more steps within runs, and more of theirs are accepted. So the rates of drafts of
    length D underrate shorter ones (of the bundled drafters 8 against 3: by 7 to 9 %)
    and overrate longer ones (3 against 8: by 15 %). Counting the steps that drafts of
    another length would have begun in the same runs is within 1 % both ways where
    tokens are drafted one after the other, and within 3 % where at once. It takes a
    position's draft to be as good whatever step it is of. Where it gets much worse with
    depth, rates are right. So shorter lengths get the larger estimate of the two,
    longer ones the smaller.
    """

    def __init__(self, num_speculative_tokens: int):
        self._known = _Counts(num_speculative_tokens)
        self._block = _Counts(num_speculative_tokens)
        self._new: Counter[Outcome] = Counter()
        self._unverified: list[tuple[int, Sequence[float]]] = []
        self._rates: list[float] | None = None  # until the step's end

    def observe(
        self,
        num_drafts: int,
        num_accepted: int,
        unverified: Sequence[float] = (),
        run: int | None = 0,
    ) -> None:
        """Takes in one request's verified drafts.

        Args:
            unverified: chances of drafts behind them, if all of them were accepted.
            run: tokens of the request up to them since a draft was rejected; None in
                steps that verify only a part of the drafts, which end no run.
        """
        self._new[Outcome(num_drafts, num_accepted, run)] += 1
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
        self._rates = None

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

    def rate_behind(self, num_accepted: int) -> float:
        """Probability that one more draft would have been accepted."""
        if self._rates is None:
            self._rates = self.rates()
        return self._rates[min(num_accepted, len(self._rates) - 1)]

    def expected_tokens(self) -> dict[int, float]:
        """Tokens of a request and step, drafts and one more, by the chain's length."""
        by_rates = [*accumulate(accumulate(self.rates(), mul), initial=1.0)]
        known, expected = self._known, [1.0]
        drafted = known.num_drafts / max(known.num_steps, PRIOR_DRAFTS)
        for k, tokens in enumerate(by_rates[1:], 1):
            of_runs = known.num_tokens + PRIOR_DRAFTS * tokens
            of_runs /= known.steps_of[k - 1] + PRIOR_DRAFTS
            tokens = max(tokens, of_runs) if k <= drafted else min(tokens, of_runs)
            expected.append(max(tokens, expected[-1]))
        return dict(enumerate(expected))


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
        run: int | None = 0,
    ) -> None:
        """Takes in one request's verified drafts, of whatever plan.

        Args:
            accepted: numbers of the accepted ones, ascending; of a chain 1, 2, ..
            num_best: of them, those before the first that is not its depth's best.
            unverified: of a chain, see `ChainAcceptance.observe`.
            run: as there.
        """
        of_smaller, depth = num_best, self.num_speculative_tokens
        self.chains.observe(min(num_drafts, depth), num_best, unverified, run)
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
