# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, learnt as requests are served. Pure Python.

What a draft is worth depends on the text and on the temperature, which change with the
requests. So older steps fade, and are forgotten at once where newer ones contradict
them.
"""

from collections import Counter, defaultdict
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
TREE_HALF_LIFE = 64  # steps after which what was seen of trees counts half
PRIOR_TREES = 16.0  # requests and steps that a guess counts
STEPS_BETWEEN_CHAINS = 32  # in which text stays the same
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


class _Gain:
    """Accepted drafts of a tree over those of the longest chain, as it turns out."""

    def __init__(self, nodes: int):
        self._told = PRIOR_TREES
        self._accepted = PRIOR_TREES * tree_gain(nodes)

    @property
    def value(self) -> float:
        return self._accepted / self._told

    def add(self, accepted: float, told: float) -> None:
        keep = min(1.0, MAX_DRAFTS / self._told)
        self._told = keep * self._told + told
        self._accepted = keep * self._accepted + accepted


class TreeAcceptance:
    """Of trees by their nodes, and of chains while trees are verified.

    A tree's accepted drafts are seen as a number only. Trees gain on the longest chain
    by a factor that depends on drafter and text far less than acceptance itself does.
    So two things are learnt apart: what the longest chain would have accepted by now,
    from whatever is verified, and each tree's gain, from trees that are tried between
    chains.

    Args:
        chains: what is known of chains.
        sizes: nodes of the trees.
    """

    def __init__(self, chains: ChainAcceptance, sizes: Iterable[int]):
        self._chains = chains
        self._gains = {nodes: _Gain(nodes) for nodes in sizes}
        # Accepted drafts by nodes, of this step and since chains were verified.
        self._new: defaultdict[int, list[int]] = defaultdict(list)
        self._run: defaultdict[int, list[int]] = defaultdict(list)
        self._saw_chain = False
        # What the longest chain accepts, as trees tell; over so many requests and
        # steps, of which the first few were guessed by the last chains.
        self._level, self._weight = self._told_by_chains(), PRIOR_TREES
        self._steps = STEPS_BETWEEN_CHAINS + 1  # since chains were verified

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        if num_drafts in self._gains:
            self._new[num_drafts].append(num_accepted)
        elif num_drafts:
            self._saw_chain = True

    def end_step(self) -> None:
        if self._saw_chain:
            if self._steps <= STEPS_BETWEEN_CHAINS:
                self._learn_gains()
            self._level, self._weight = self._told_by_chains(), PRIOR_TREES
            self._saw_chain, self._steps = False, 0
            self._run.clear()
        for nodes, accepted in self._new.items():
            self._take(nodes, accepted)
        self._steps += bool(self._new)
        self._new.clear()

    def _learn_gains(self) -> None:
        """From trees between chains: text was the same, or it has changed back."""
        told = self._told_by_chains()
        for nodes, accepted in self._run.items():
            self._gains[nodes].add(sum(accepted), len(accepted) * told)

    def _take(self, nodes: int, accepted: list[int]) -> None:
        if self._steps <= STEPS_BETWEEN_CHAINS:
            self._run[nodes] += accepted
        self._weight = self._weight * 0.5 ** (1 / TREE_HALF_LIFE) + len(accepted)
        told = sum(accepted) / self._gains[nodes].value
        self._level += (told - self._level * len(accepted)) / self._weight

    def _told_by_chains(self) -> float:
        tokens = self._chains.expected_tokens()
        return tokens[max(tokens)] - 1.0

    def expected_tokens(self) -> dict[int, float]:
        chains = self._chains.expected_tokens()
        scale = self._level / max(self._told_by_chains(), 1e-9)
        expected = {k: 1.0 + scale * (tokens - 1.0) for k, tokens in chains.items()}
        for nodes, gain in self._gains.items():
            expected[nodes] = 1.0 + self._level * gain.value
        return expected


def tree_gain(nodes: int) -> float:
    """Accepted drafts of a tree over those of the longest chain, before any is seen.

    Of PARD on held-out text, greedy and at temperature 0.5: 1.19, 1.33, 1.47 and 1.60
    with 7, 15, 31 and 63 nodes; about a quarter more at 0.8.
    """
    return 0.79 + 0.135 * log2(nodes + 1)
