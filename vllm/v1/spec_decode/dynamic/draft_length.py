# SPDX-License-Identifier: Apache-2.0
"""Chooses how many tokens to draft, for the batch at hand.

A step with n requests that verifies and drafts k tokens each takes seconds[n][k] and
yields n * E(k) tokens, where E(k) = 1 + a1 + a1 a2 + .. + a1 a2 .. ak and ai is the
probability that draft i is accepted after those before it were. The times are measured
once, the acceptance is estimated as requests are served, and the k with the highest
E(k) / seconds[n][k] is drafted. Pure Python; asked once and told once per step.
"""

import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from operator import mul

from vllm.config.drafter.length import is_auto
from vllm.logger import init_logger

logger = init_logger(__name__)

# Seconds of a step by number of requests, then by draft length; every number of
# requests has the same draft lengths.
PassTimes = dict[int, dict[int, float]]

HALF_LIFE = 512  # steps after which what was seen counts half
MAX_DRAFTS = 1024  # of a position, however many requests there are
# Before anything is seen, and where little is: the first draft is accepted so often,
# each later one a little less often than the one before, as if seen on so many drafts.
PRIOR_ACCEPTANCE = 0.7
PRIOR_DECLINE = 0.95
PRIOR_DRAFTS = 4.0
# Another length must promise this much more throughput.
HYSTERESIS = 0.01
# Share of all time that trying longer drafts may cost. A try lasts for so many drafts,
# over several steps if requests are few. In the steps where it begins and ends, what is
# drafted and what is verified differ in length, for which there may be no CUDA graph:
# so much more time, in steps, is reckoned for both together.
TRIAL_BUDGET = 0.004
TRIAL_DRAFTS = 16
SWITCH_COST = 0.6
LOG_SECONDS = 10.0


class AcceptanceEstimate:
    """Acceptance by position: fading counts, and a guess where there are few.

    Older steps count less by time (`HALF_LIFE`), and in large batches by number
    (`MAX_DRAFTS`), so that both a lone request and a full batch adapt within seconds.
    """

    def __init__(self, num_speculative_tokens: int):
        self._reached = [0.0] * num_speculative_tokens  # drafted, all before accepted
        self._accepted = [0.0] * num_speculative_tokens
        self._new: Counter[tuple[int, int]] = Counter()

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Takes in one request's verified drafts."""
        self._new[num_draft_tokens, num_accepted_tokens] += 1

    def fade(self) -> None:
        """Ends a step: what was seen is taken in, and all before fades."""
        keep = 0.5 ** (1 / HALF_LIFE)
        self._reached = [count * keep for count in self._reached]
        self._accepted = [count * keep for count in self._accepted]
        for (drafted, accepted), count in self._new.items():
            for i in range(min(accepted + 1, drafted)):
                self._reached[i] += count
            for i in range(accepted):
                self._accepted[i] += count
        self._new.clear()
        for i, reached in enumerate(self._reached):
            if reached > MAX_DRAFTS:
                self._reached[i] = MAX_DRAFTS
                self._accepted[i] *= MAX_DRAFTS / reached

    def rates(self) -> list[float]:
        """Probability that a draft is accepted if those before it were: [K]."""
        rates, guess = [], PRIOR_ACCEPTANCE
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            rate = (accepted + PRIOR_DRAFTS * guess) / (reached + PRIOR_DRAFTS)
            rates.append(rate)
            guess = rate * PRIOR_DECLINE
        return rates

    def expected_tokens(self) -> list[float]:
        """Tokens of a request per step, by draft length: [K + 1], from 1.0 on."""
        return list(accumulate(accumulate(self.rates(), mul), initial=1.0))


class DraftLengths:
    """Stands where the scheduler has a lookup from batch size to draft length.

    Args:
        num_speculative_tokens: the longest draft.
        seconds: measured step times of each draft length to choose from; empty makes
            every draft the longest.
    """

    def __init__(self, num_speculative_tokens: int, seconds: PassTimes):
        self.num_speculative_tokens = num_speculative_tokens
        self.seconds = seconds
        self.acceptance = AcceptanceEstimate(num_speculative_tokens)
        self.observe = self.acceptance.observe
        self._rows: dict[int, dict[int, float]] = {}
        self._chosen: dict[int, int] = {}
        self._purse = 0.0  # what a try may cost by now, in steps
        self._trial_steps = 0  # left of the present try
        self._next_log = 0.0
        if seconds:
            logger.info("Draft length by batch size at first: %s.", self._describe())
        else:
            logger.warning(
                "Every draft has %d tokens: no step times were measured to choose by.",
                num_speculative_tokens,
            )

    def __getitem__(self, batch_size: int) -> int:
        """The draft length for a step; to be asked once per step."""
        if not self.seconds:
            return self.num_speculative_tokens
        self.acceptance.fade()
        tokens = self.acceptance.expected_tokens()
        chosen = self._choose(batch_size, tokens)
        return self._try_longer(batch_size, chosen, tokens)

    def _choose(self, batch_size: int, tokens: list[float]) -> int:
        seconds = self.step_seconds(batch_size)
        best = max(seconds, key=lambda k: tokens[k] / seconds[k])
        held = self._chosen.get(batch_size)
        if held is not None:
            gain = tokens[best] * seconds[held] / (tokens[held] * seconds[best])
            if gain < 1 + HYSTERESIS:
                return held
        self._chosen[batch_size] = best
        self._log_change()
        return best

    def _try_longer(self, batch_size: int, chosen: int, tokens: list[float]) -> int:
        """Now and then the next longer draft: else nothing is known of it.

        Shorter ones need no try: their acceptance is part of the chosen one's.
        """
        seconds = self.step_seconds(batch_size)
        longer = min((k for k in seconds if k > chosen), default=None)
        if longer is None:
            return chosen
        if not self._trial_steps:
            self._purse += TRIAL_BUDGET
            time_added = seconds[longer] / seconds[chosen]
            loss = max(0.0, time_added - tokens[longer] / tokens[chosen])
            steps = -(-TRIAL_DRAFTS // batch_size)
            if self._purse < SWITCH_COST + steps * loss:
                return chosen
            self._purse, self._trial_steps = 0.0, steps
        self._trial_steps -= 1
        return longer

    def step_seconds(self, batch_size: int) -> dict[int, float]:
        """Seconds of a step by draft length, linear between the measured sizes."""
        row = self._rows.get(batch_size)
        if row is None:
            row = self._rows[batch_size] = self._interpolate(batch_size)
        return row

    def _interpolate(self, n: int) -> dict[int, float]:
        sizes = sorted(self.seconds)
        after = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        if n in self.seconds or not after:
            return self.seconds.get(n, self.seconds[sizes[0]])
        # Two sizes on each side, as far as there are any.
        around = sizes[max(after - 2, 0) : after + 2]
        at = after - max(after - 2, 0)
        return {
            k: between([(m, self.seconds[m][k]) for m in around], at, n)
            for k in self.seconds[sizes[0]]
        }

    def _log_change(self) -> None:
        now = time.monotonic()
        if now < self._next_log:
            return
        self._next_log = now + LOG_SECONDS
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance.rates())
        logger.debug(
            "Draft length by batch size: %s; acceptance of each draft after those "
            "before it: %s.",
            self._describe(),
            rates,
        )

    def _describe(self) -> str:
        tokens = self.acceptance.expected_tokens()
        best = {
            n: max(row, key=lambda k: tokens[k] / row[k])
            for n, row in sorted(self.seconds.items())
        }
        return ", ".join(f"{n}: {k}" for n, k in best.items())


def between(points: list[tuple[int, float]], at: int, n: int) -> float:
    """Seconds for n requests, which lie before points[at], or past the last point.

    Times are flat while memory-bound and rise once compute-bound: a curve that bends
    upwards. Its chord lies above it, the lines of the neighbouring points below it;
    the answer lies midway.
    """

    def line(i: int) -> float:
        (n1, t1), (n2, t2) = points[i : i + 2]
        return t1 + (n - n1) / (n2 - n1) * max(0.0, t2 - t1)  # less is noise

    chord, before, behind = line(at - 1), points[at - 1][1], 0.0
    if n > points[at][0]:
        return chord
    if at >= 2:
        before = line(at - 2)
    if at + 1 < len(points):
        behind = line(at)
    return (chord + min(chord, max(before, behind))) / 2


def auto_lengths(spec) -> DraftLengths | None:
    """For the speculative config of an engine that chooses draft lengths by itself."""
    if not is_auto(spec):
        return None
    return DraftLengths(spec.num_speculative_tokens, spec.pass_times or {})
