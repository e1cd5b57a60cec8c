# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, learnt as requests are served. Pure Python.

What a draft is worth depends on the text and on the temperature, which change with the
requests. So older steps fade, and are forgotten at once where newer ones contradict
them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import log, log2
from operator import mul
from typing import Protocol

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
TREE_HALF_LIFE = 128  # steps after which what was seen of trees counts half
PRIOR_TREES = 16.0  # requests and steps that a guess of a tree counts
CONTRADICTION = 6.0


class PlanAcceptance(Protocol):
    """What is known of the acceptance of some of the plans that a step can follow.

    A plan is known by `num_drafts`, the drafts of each request that it verifies.
    """

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Takes in one request's verified drafts, of whatever plan."""

    def end_step(self) -> None:
        """What was observed is of one step, which is over."""

    def expected_tokens(self) -> Mapping[int, float]:
        """Tokens of a request and step, drafts and one more, by `num_drafts`."""


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
    """

    def __init__(self, num_speculative_tokens: int):
        self._known = _Counts(num_speculative_tokens)
        self._block = _Counts(num_speculative_tokens)
        self._new: Counter[tuple[int, int]] = Counter()

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        if num_drafts <= len(self._known.reached):
            self._new[num_drafts, num_accepted] += 1

    def end_step(self) -> None:
        self._known.fade()
        self._block.add(self._new)
        is_full = self._block.reached[0] >= BLOCK_DRAFTS
        if is_full and self._contradicts():
            self._known = self._block
        else:
            self._known.add(self._new)
        if is_full:
            self._block = _Counts(len(self._known.reached))
        self._new.clear()

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
        tokens = accumulate(accumulate(self.rates(), mul), initial=1.0)
        return dict(enumerate(tokens))

    @property
    def weight(self) -> float:
        """Requests and steps that it goes by, older ones less."""
        return self._known.reached[0]


class _Mean:
    """Accepted drafts of a request and step, older ones counting less."""

    def __init__(self) -> None:
        self.weight = self.accepted = 0.0

    def add(self, requests: int, accepted: int) -> None:
        keep = 0.5 ** (1 / TREE_HALF_LIFE)
        keep *= min(1.0, MAX_DRAFTS / max(self.weight, 1.0))
        self.weight = self.weight * keep + requests
        self.accepted = self.accepted * keep + accepted

    def with_prior(self, accepted: float) -> float:
        seen = self.accepted + PRIOR_TREES * accepted
        return seen / (self.weight + PRIOR_TREES)


class TreeAcceptance:
    """Of trees by their nodes, and of chains while trees are verified.

    A tree's accepted drafts are seen as a number only. What was not verified of late is
    told from what was: trees of the same text and drafter gain on the longest chain by
    a factor that depends on their nodes, and on little else (`tree_gain`).

    Args:
        chains: what is known of chains.
        sizes: nodes of the trees.
    """

    def __init__(self, chains: ChainAcceptance, sizes: Iterable[int]):
        self._chains = chains
        self._trees = {nodes: _Mean() for nodes in sizes}
        self._new: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        if num_drafts in self._trees:
            self._new[num_drafts] += 1
            self._accepted[num_drafts] += num_accepted

    def end_step(self) -> None:
        for nodes, mean in self._trees.items():
            mean.add(self._new[nodes], self._accepted[nodes])
        self._new.clear()
        self._accepted.clear()

    def expected_tokens(self) -> dict[int, float]:
        chains = self._chains.expected_tokens()
        longest = max(chains)
        told = chains[longest] - 1.0
        nodes, latest = max(self._trees.items(), key=lambda item: item[1].weight)
        if latest.weight > self._chains.weight:
            prior = told * tree_gain(nodes)
            told = latest.with_prior(prior) / tree_gain(nodes)
        scale = told / max(chains[longest] - 1.0, 1e-9)
        expected = {k: 1.0 + scale * (tokens - 1.0) for k, tokens in chains.items()}
        for nodes, mean in self._trees.items():
            expected[nodes] = 1.0 + mean.with_prior(told * tree_gain(nodes))
        return expected


def tree_gain(nodes: int) -> float:
    """Accepted drafts of a tree over those of the longest chain, before any is seen.

    Of PARD on held-out text, greedy and at temperature 0.5: 1.19, 1.33, 1.47 and 1.60
    with 7, 15, 31 and 63 nodes; about a quarter more at 0.8.
    """
    return 0.79 + 0.135 * log2(nodes + 1)
