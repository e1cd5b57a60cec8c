# SPDX-License-Identifier: Apache-2.0
"""Chooses how much to draft ("auto"), by expected tokens per second.

A plan is given by its drafts per request: none, a chain of some length, or a tree of
some number of nodes, which is above the longest chain. A step of n requests, of which m
can use drafts, yields m * E(p) + n - m tokens if it verifies plan p, and takes
seconds[p].

- E(p) is the acceptance length, estimated while serving (`acceptance.py`). For a chain
  it is E(k) = 1 + a1 + a1 a2 + .. + a1 a2 .. ak, where ai is the probability that draft
  i is accepted if those before it are, with a correction for runs of accepted drafts.
- seconds[p] is measured at start (`pass_times.py`), and corrected by the steps that are
  served (`served_times.py`).

What is never drafted is never learned. So other plans are tried now and then, within
small shares of all time (`tries.py`).
"""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm.config.drafter.length import MAX_TREE_ROWS
from vllm.logger import init_logger

from .acceptance import NO_TREES, ChainAcceptance, Verified
from .acceptance_by_kind import ALL_GREEDY, NONE_DRAFTS, AcceptanceByKind, Shares
from .gain import Choice, Gain
from .served_times import ServedTimes
from .step_times import PassTimes, Row, StepTimes
from .tries import (
    FIRST_BUDGET,
    GOOD_RATE,
    MOST_SAVED,
    SWITCH_COST,
    TIMED_STEPS,
    TRIAL_DRAFTS,
    FirstDrafts,
    TimingTries,
    Tries,
)

logger = init_logger(__name__)

# Another plan is chosen only if it promises this much more throughput.
HYSTERESIS = 0.01
# Shares of all time that tries of other plans may cost: of larger ones, and of drafting
# nothing, whose step time the reported gain needs. The second number is the share until
# the first try; for the latter see `TimingTries`. A try of a larger plan verifies
# `TRIAL_DRAFTS`, over several steps if there are few requests.
TRIAL_BUDGET, UNDRAFTED_BUDGET = (0.004, 0.02), (0.001, 0.005)
# Fewest steps from one try of drafting to the next, while nothing is drafted.
STEPS_BETWEEN_TRIES = SWITCH_COST / FIRST_BUDGET
LARGER, LARGER_TREE, UNTIMED = TURNS = range(3)  # kinds of plans to try, in turns
NO_GAINS: Mapping[int, float] = {}
LOG_SECONDS = 60.0  # least time between log lines about the choice


class Load(NamedTuple):
    """The batch of a step."""

    num_reqs: int
    num_drafting: int  # requests that can use drafts
    context: float  # mean tokens of a request so far
    has_grammar: bool = False  # whether any request has one: then nothing is trimmed
    age: float = float("inf")  # mean output tokens of a request so far
    shares: Shares = ALL_GREEDY  # of the kinds of requests that can use drafts

    def tokens(self, expected: float) -> float:
        """Tokens of the step, if a request with drafts gets `expected`."""
        return self.num_reqs + self.num_drafting * (expected - 1.0)


class Offer(NamedTuple):
    """Expected tokens and seconds of a step, by plan."""

    tokens: Mapping[int, float]
    seconds: Row
    gains: Mapping[int, float]  # what trimming adds, as a share; `tokens` include it

    def per_second(self, plan: int) -> float:
        return self.tokens[plan] / self.seconds[plan]

    def loss(self, other: int, chosen: int) -> float:
        """What a step of another plan costs, in steps of the chosen one."""
        value = self.tokens[other] / self.tokens[chosen]
        return max(0.0, self.seconds[other] / self.seconds[chosen] - value)

    def best(self) -> int:
        """The plan with the most tokens per second; if it is trimmed, the shortest
        trimmed one that is about as good.

        Accepted drafts come in runs, which long drafts cover: rates observed with them
        underestimate shorter drafts. `ChainAcceptance` corrects this, but not by
        trimmed steps.
        """
        best = max(self.seconds, key=self.per_second)
        if not self.gains.get(best):
            return best
        trimmed = (plan for plan in self.seconds if self.gains.get(plan))
        return min(plan for plan in trimmed if not self._is_more(best, plan))

    def is_better(self, best: int, held: int) -> bool:
        """Whether the best plan replaces the one that was chosen before."""
        is_shorter = self.gains.get(best) and best < held
        return bool(is_shorter) or self._is_more(best, held)

    def _is_more(self, plan: int, other: int) -> bool:
        return self.per_second(plan) >= self.per_second(other) * (1 + HYSTERESIS)


class DraftLengths:
    """Chooses drafts per request, by step times and acceptance.

    Args:
        num_speculative_tokens: K, the longest chain.
        measured: step times of each plan to choose from; if empty, every step drafts
            the longest chain.
        trees: nodes of the trees to choose from, and their depths.
        steps_held: for how many steps a choice holds.

    Attributes:
        may_hold: whether the last choice is good for some more steps: it is not part of
            a try of another plan, and enough is known of the requests.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        measured: PassTimes,
        trees: Mapping[int, int] = NO_TREES,
        steps_held: int = 1,
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self.steps_held = steps_held
        self.times, self.served = StepTimes(measured), ServedTimes()
        self.acceptance = AcceptanceByKind(num_speculative_tokens, trees)
        self.may_hold = False
        self._shares = ALL_GREEDY  # of the last step
        self._hoped = self.acceptance.expected_tokens()  # by the prior alone
        depths = {plan: trees.get(plan, plan) for plan in self._hoped}
        self._if_good = {
            plan: (1.0 - GOOD_RATE ** (depth + 1)) / (1.0 - GOOD_RATE)
            for plan, depth in depths.items()
        }
        self._chosen: dict[int, int] = {}
        # The prior may be wrong, and so may times that were measured at start: if they
        # say that drafting does not pay, it is tried with the first requests.
        self._first, self._age = FirstDrafts(MOST_SAVED), float("inf")
        self._tries = Tries(*TRIAL_BUDGET)
        self._undrafted = TimingTries(self.served, *UNDRAFTED_BUDGET)
        self._tried: list[ChainAcceptance] = []  # whose blocks the last try began
        self._trees, self._turn = set(trees), LARGER
        self._next_log, self._logged = time.monotonic() + LOG_SECONDS, -1
        self._elapsed = steps_held
        self.choice: Choice | None = None  # the last one
        # Tokens and seconds of the same step without drafts.
        self._undrafted_step: tuple[float | None, float | None] = None, None
        self.gain = Gain()
        if measured:
            logger.info(
                "Initial draft length by batch size, with the acceptance length above "
                "which it gains, its step time, and that without drafts: %s.",
                self._describe(),
            )
        else:
            logger.warning(
                "Every draft has %d tokens: no step times were measured to choose by.",
                num_speculative_tokens,
            )

    def observe(self, drafts: Verified, **of_request: Any) -> None:
        """Records a request's drafts; see `AcceptanceByKind.observe`."""
        self.acceptance.observe(drafts, **of_request)
        self._first.observe(len(drafts.accepted))

    def observe_seconds(
        self, num_reqs: int, context: float, num_drafts: int, seconds: float
    ) -> None:
        """Records the time of a step that verified and drafted `num_drafts` each."""
        if self.times:
            measured = self.times.seconds(num_reqs, context).get(num_drafts)
            if measured is not None:
                self.served.observe(num_reqs, num_drafts, seconds / measured)

    def end_steps(self, num_steps: int = 1) -> None:
        """Takes in the observations since the last call, of `num_steps` steps."""
        self.acceptance.end_steps(self._shares, num_steps)

    def choose(
        self,
        load: Load,
        gains: Mapping[int, float] = NO_GAINS,
        elapsed: int | None = None,
    ) -> int:
        """Drafts per request in the next step, or in the next `steps_held`.

        Args:
            load: of the step.
            gains: throughput that trimming adds to a plan, as a share of that with all
                drafts verified.
            elapsed: steps since the last call; None: `steps_held`.
        """
        self._elapsed = elapsed or self.steps_held
        if not self.times:
            return self.num_speculative_tokens
        self._shares = load.shares if load.num_drafting else NONE_DRAFTS
        seconds = self._offered(load)
        expected = self.acceptance.expected_tokens(load.shares)
        tokens = {
            plan: load.tokens(expected[plan]) * (1.0 + gains.get(plan, 0.0))
            for plan in seconds
        }
        if load.num_drafting:
            offer = Offer(tokens, seconds, gains)
            held = self._hold(load.num_reqs, offer)
            self._log_choice(load, held, expected, seconds)
            drafts_none = self._tries_none(load, held, offer)
            chosen = self._try_drafts(load, held, offer)
            if chosen == held:
                chosen = 0 if drafts_none else self._try_another(load, held, offer)
            is_try = chosen != held or self._first.is_going_on
            kinds = self.acceptance.chains(load.shares)
            self.may_hold = not is_try and all(chains.is_known for chains in kinds)
        else:
            chosen = min(seconds)  # the shortest plan: no request can use drafts
            self.may_hold = True
        self.choice = Choice(chosen, tokens[chosen], seconds[chosen])
        # A step without drafts does the least: a longer time of it is an error.
        least = min(seconds.values()) if 0 in seconds else None
        self._undrafted_step = tokens.get(0), least
        self.gain.add(self.choice, *self._undrafted_step)
        return chosen

    def choose_again(self) -> int:
        """The last choice, which holds for one more step."""
        if self.choice is None:  # there are no step times to choose by
            return self.num_speculative_tokens
        self.gain.add(self.choice, *self._undrafted_step)
        return self.choice.num_drafts

    def _offered(self, load: Load) -> Row:
        """Seconds of a step by plan, without trees of too many rows to pay."""
        seconds = self.times.seconds(load.num_reqs, load.context)
        seconds = self.served.correct(load.num_reqs, seconds)
        return {
            plan: each
            for plan, each in seconds.items()
            if plan not in self._trees or load.num_reqs * (plan + 1) <= MAX_TREE_ROWS
        }

    def _hold(self, num_reqs: int, offer: Offer) -> int:
        """The best plan, or the one chosen before if it is about as good."""
        best, held = offer.best(), self._chosen.get(num_reqs)
        if held in offer.seconds and not offer.is_better(best, held):
            return held
        self._chosen[num_reqs] = best
        return best

    def _try_drafts(self, load: Load, chosen: int, offer: Offer) -> int:
        """If nothing is drafted, now and then tries what is best if most drafts are
        accepted. Few drafts take less time, but cannot show that many would pay."""
        # Requests get older, and a new one in the place of another lowers the mean.
        is_new, self._age = load.age < self._age, load.age
        if 0 not in offer.seconds or len(offer.seconds) == 1:
            return chosen
        if chosen:
            worth = offer.tokens[chosen] / offer.tokens[0]
            saved = worth - offer.seconds[chosen] / offer.seconds[0]
            self._first.save(saved * self._elapsed)
            return chosen
        good = {k: load.tokens(self._if_good[k]) for k in offer.seconds if k}
        other = max(good, key=lambda plan: good[plan] / offer.seconds[plan])
        loss = max(0.0, offer.seconds[other] / offer.seconds[0] - 1.0)
        needed = loss * load.num_reqs / load.num_drafting
        tries, hope = self._first, self._hoped[other] - 1.0
        if not tries.go_on(loss, needed, hope, is_new, self.steps_held, self._elapsed):
            return 0
        if not tries.seen:
            self._tried = [*self.acceptance.chains(load.shares)]
            for chains in self._tried:
                chains.begin_block()
        elif tries.seen >= TRIAL_DRAFTS:
            # Only of kinds that were there when the try began: the blocks of others
            # are older than it.
            for chains in self._tried:
                chains.believe_block()
            self._tried = []
        return other

    def _try_another(self, load: Load, chosen: int, offer: Offer) -> int:
        """Now and then tries another plan, of which nothing new is learned otherwise.

        In turns: the next larger plan, the next larger tree, and the best plan that has
        not been timed while serving. Acceptance of chains that are no deeper needs no
        try: it is learned from the chosen plan.
        """
        other = self._to_try(load.num_reqs, chosen, offer)
        if other is None:
            self._end_turn()
            return chosen
        steps = max(-(-TRIAL_DRAFTS // load.num_drafting), self.steps_held)
        if self._turn == UNTIMED:
            steps = max(steps, TIMED_STEPS)
        loss = offer.loss(other, chosen)
        if not self._tries.go_on(steps, loss, self.steps_held, self._elapsed):
            return chosen
        if not self._tries.steps:
            self._end_turn()
        return other

    def _tries_none(self, load: Load, chosen: int, offer: Offer) -> bool:
        """Whether to draft nothing so that such a step is timed, once the chosen plan
        has been: with times measured at start the gain could be wrong."""
        seen = self.served.seen(load.num_reqs)
        if not chosen or chosen not in seen or 0 not in offer.seconds:
            return False
        how = offer.loss(0, chosen), self.steps_held, self._elapsed
        return self._undrafted.go_on(load.num_reqs, 0, *how)

    def _end_turn(self) -> None:
        self._turn = (self._turn + 1) % len(TURNS)

    def _to_try(self, num_reqs: int, chosen: int, offer: Offer) -> int | None:
        larger = sorted(plan for plan in offer.seconds if plan > chosen > 0)
        if self._turn == LARGER:
            return next(iter(larger), None)
        if self._turn == LARGER_TREE:
            return next((plan for plan in larger if plan in self._trees), None)
        if not (seen := self.served.seen(num_reqs)):
            return None  # nothing was timed yet, or steps cannot be timed
        # A plan that would be trimmed is not timed as itself, see `TRIMMED`.
        whole = {plan for plan in offer.seconds if not offer.gains.get(plan)}
        return max(whole - seen - {chosen}, key=offer.per_second, default=None)

    def _log_choice(
        self, load: Load, chosen: int, expected: dict[int, float], seconds: Row
    ) -> None:
        """Logs a change of the chosen plan and its alternatives, now and then."""
        if time.monotonic() < self._next_log or chosen == self._logged:
            return
        self._next_log, self._logged = time.monotonic() + LOG_SECONDS, chosen

        def said(plan: int) -> str:
            return f"{expected[plan]:.2f} tokens in {1e3 * seconds[plan]:.2f} ms"

        def named(plan: int) -> str:
            return f"tree of {plan}" if plan in self._trees else f"{plan}"

        others = [f"{named(plan)}: {said(plan)}" for plan in seconds if plan != chosen]
        logger.info(
            "Draft length %s for %d requests of %d tokens: %s each. Others: %s.",
            named(chosen),
            load.num_reqs,
            load.context,
            said(chosen),
            ", ".join(others),
        )

    def _describe(self) -> str:
        expected = self.acceptance.expected_tokens()
        context = min(self.times.measured)
        shortest = self.times.measured[context]

        def said(num_reqs: int, row: Row) -> str:
            best = Offer(expected, row, NO_GAINS).best()
            if not best or 0 not in row:
                return str(best)
            # The ratio is the acceptance length above which it gains.
            times = f"{1e3 * row[best]:.2f} ms, {1e3 * row[0]:.2f} ms"
            return f"{best} ({row[best] / row[0]:.2f}; {times})"

        return ", ".join(f"{n}: {said(n, row)}" for n, row in sorted(shortest.items()))
