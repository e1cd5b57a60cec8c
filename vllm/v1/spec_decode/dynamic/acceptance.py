# SPDX-License-Identifier: Apache-2.0
"""How likely drafts are accepted, learnt as requests are served. Pure Python.

What a draft is worth depends on the text and on the temperature, which change with the
requests. So older steps fade, and are forgotten at once where newer ones contradict
them.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from math import log
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
