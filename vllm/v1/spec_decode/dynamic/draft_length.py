# SPDX-License-Identifier: Apache-2.0
"""Chooses how much to draft, for the batch at hand.

A step can follow one of several plans, each known by its drafts per request: none, a
chain of some length, a tree of so many nodes, which are more than the longest chain. Of
n requests m can use drafts. A step in which plan p is verified takes seconds[p] and
yields m * E(p) + n - m tokens; for a chain, E(k) = 1 + a1 + a1 a2 + .. + a1 a2 .. ak,
where ai is the probability that draft i is accepted after those before it were. Times
are measured at start (`pass_times.py`) and corrected as requests are served
(`served_times.py`), acceptance is estimated then (`acceptance.py`), and the plan that
yields most per second is drafted. Pure Python.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.config.drafter.length import MAX_TREE_ROWS
from vllm.logger import init_logger

from .acceptance_by_kind import ALL_GREEDY, NONE_DRAFTS, AcceptanceByKind, Shares
from .served_times import LEAST_STEPS, ServedTimes, size_of
from .step_times import PassTimes, Row, StepTimes, on_line
from .tries import FIRST_BUDGET, SWITCH_COST, TRIAL_DRAFTS, FirstDrafts, Tries

logger = init_logger(__name__)

# Another plan must promise this much more throughput.
HYSTERESIS = 0.01
# Shares of all time that it may cost to try other plans, and to draft nothing, which
# tells the gain. Each size of a batch may draft nothing at once, where that costs so
# many steps, and again once what was seen of it weighs no more than `RECENT`. A try of
# a larger plan lasts for `TRIAL_DRAFTS`, over several steps if requests are few.
TRIAL_BUDGET, UNDRAFTED_BUDGET = 0.004, 0.001
UNDRAFTED_STEPS, RECENT = 8.0, 0.5
# From one try to draft to the next there are so many steps at least.
STEPS_BETWEEN_TRIES = SWITCH_COST / FIRST_BUDGET
TIMED_STEPS = LEAST_STEPS + 2  # the first ones follow another plan
LARGER, LARGER_TREE, UNTIMED = TURNS = range(3)  # what is tried
NO_GAINS: Mapping[int, float] = {}
GAIN_SECONDS = 10.0  # of steps after which a step counts half in the gain that is told
LOG_SECONDS = 60.0  # between lines that say what is chosen and why, at least


class Load(NamedTuple):
    """What a step has to do."""

    num_reqs: int
    num_drafting: int  # requests that can use drafts
    context: float  # tokens that a request has behind it, on average
    has_grammar: bool = False  # of any request: then all drafts are verified
    age: float = float("inf")  # tokens that a request was given so far, on average
    shares: Shares = ALL_GREEDY  # of the kinds of requests that can use drafts

    def tokens(self, expected: float) -> float:
        """Tokens of the step, where `expected` is what a draft's request gets."""
        return self.num_reqs + self.num_drafting * (expected - 1.0)


class Offer(NamedTuple):
    """What each plan would come to in a step."""

    tokens: Mapping[int, float]
    seconds: Row
    gains: Mapping[int, float]  # shares that verifying a part of the drafts adds

    def per_second(self, plan: int) -> float:
        return self.tokens[plan] / self.seconds[plan]

    def loss(self, other: int, chosen: int) -> float:
        """Of a step of another plan, in steps of the chosen one."""
        value = self.tokens[other] / self.tokens[chosen]
        return max(0.0, self.seconds[other] / self.seconds[chosen] - value)

    def best(self) -> int:
        """What yields most; of lengths that are trimmed, the shortest as good as that.

        Accepted drafts come in runs, which long drafts leap over. So where those are
        verified, their rates make shorter ones look worse than they turn out to be.
        """
        best = max(self.seconds, key=self.per_second)
        if not self.gains.get(best):
            return best
        trimmed = (plan for plan in self.seconds if self.gains.get(plan))
        return min(plan for plan in trimmed if not self._is_more(best, plan))

    def is_better(self, best: int, held: int) -> bool:
        """Whether the best plan is to take the place of another."""
        is_shorter = self.gains.get(best) and best < held
        return bool(is_shorter) or self._is_more(best, held)

    def _is_more(self, plan: int, other: int) -> bool:
        return self.per_second(plan) >= self.per_second(other) * (1 + HYSTERESIS)


class Choice(NamedTuple):
    """What a step is to draft, and what that is expected to come to."""

    num_drafts: int
    tokens: float  # of the step
    seconds: float


class Gain:
    """Throughput over that without drafts: of steps as they were chosen, of which the
    last few seconds count.

    Attributes:
        value: None until a step was chosen among some that draft nothing.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self._seconds = self._undrafted = 0.0

    def add(self, choice: Choice, tokens: float | None, seconds: float | None) -> None:
        """Takes in a step; `tokens` and `seconds` are those of one without drafts."""
        if not tokens or seconds is None:
            return
        keep = 0.5 ** (choice.seconds / GAIN_SECONDS)
        undrafted = choice.tokens / tokens * seconds
        self._seconds = keep * self._seconds + choice.seconds
        self._undrafted = keep * self._undrafted + undrafted
        self.value = self._undrafted / self._seconds


class DraftLengths:
    """Chooses drafts per request, by step times and acceptance.

    Args:
        num_speculative_tokens: the longest chain of a request.
        measured: step times of each plan to choose from; empty makes every draft the
            longest chain.
        trees: nodes of the trees to choose from.
        steps_held: for how many steps a choice holds.
        left_out: by context, seconds of the drafter for each token of a step that
            drafts nothing, which are no part of that step; empty: it leaves out none.
        outlives: whether the drafter also runs over what it left out of requests that
            have ended, since others may find it in the KV cache.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        measured: PassTimes,
        trees: Sequence[int] = (),
        steps_held: int = 1,
        left_out: Mapping[int, float] = NO_GAINS,
        outlives: bool = True,
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self.steps_held, self._left_out = steps_held, sorted(left_out.items())
        self._outlives = outlives
        self.times, self.served = StepTimes(measured), ServedTimes()
        self.acceptance = AcceptanceByKind(num_speculative_tokens, trees)
        self._shares = ALL_GREEDY  # of the last step
        self._hoped = self.acceptance.expected_tokens()  # before anything is seen
        self._chosen: dict[int, int] = {}
        self._first, self._age = FirstDrafts(), float("inf")
        self._tries = Tries(TRIAL_BUDGET)
        self._undrafted: defaultdict[int, Tries] = defaultdict(  # by size of a batch
            lambda: Tries(UNDRAFTED_BUDGET, UNDRAFTED_STEPS)
        )
        self._trees, self._turn = set(trees), LARGER
        self._next_log, self._logged = time.monotonic() + LOG_SECONDS, -1
        self.choice: Choice | None = None  # the last one
        self.gain = Gain()
        if measured:
            logger.info(
                "Draft length by batch size at first, from which acceptance length on "
                "it gains, and its step beside one without drafts: %s.",
                self._describe(),
            )
        else:
            logger.warning(
                "Every draft has %d tokens: no step times were measured to choose by.",
                num_speculative_tokens,
            )

    def observe(
        self,
        num_drafts: int,
        accepted: Sequence[int],
        num_best: int,
        unverified: Sequence[float] = (),
        **of_request: Any,
    ) -> None:
        """Takes in one request's verified drafts; see `AcceptanceByKind.observe`."""
        of_drafts = num_drafts, accepted, num_best, unverified
        self.acceptance.observe(*of_drafts, **of_request)
        self._first.observe(len(accepted))

    def observe_seconds(
        self, num_reqs: int, context: float, num_drafts: int, seconds: float
    ) -> None:
        """Takes in what a step of requests that all verify and draft as many took."""
        if self.times:
            measured = self.times.seconds(num_reqs, context).get(num_drafts)
            if measured is not None:
                self.served.observe(num_reqs, num_drafts, seconds / measured)

    def end_step(self) -> None:
        """What was observed is of one step, which is over."""
        self.acceptance.end_step(self._shares)

    def choose(self, load: Load, gains: Mapping[int, float] = NO_GAINS) -> int:
        """Drafts per request in the next step, or in the next `steps_held`.

        Args:
            load: of the step.
            gains: throughput that verifying a part of the drafts adds to a plan, as a
                share of what verifying all of them gives.
        """
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
        else:
            chosen = min(seconds)  # whatever was measured: nobody takes drafts
        self.choice = Choice(chosen, tokens[chosen], seconds[chosen])
        # A step without drafts does the least; where it seems slower, it was mistimed.
        least = min(seconds.values()) if 0 in seconds else None
        self.gain.add(self.choice, tokens.get(0), least)
        return chosen

    def _offered(self, load: Load) -> Row:
        """Seconds of a step by plan; without trees that have too many rows to pay."""
        seconds = self.times.seconds(load.num_reqs, load.context)
        seconds = self.served.correct(load.num_reqs, seconds)
        return {
            plan: each
            for plan, each in self._with_left_out(load, seconds).items()
            if plan not in self._trees or load.num_reqs * (plan + 1) <= MAX_TREE_ROWS
        }

    def _with_left_out(self, load: Load, seconds: Row) -> Row:
        """With what the drafter makes up for later, if nothing is drafted.

        Before the next try it runs over what it left out of requests that still run:
        as much as they were given since the try before, of all tokens since then.
        """
        if 0 not in seconds or not self._left_out:
            return seconds
        share = 1.0 if self._outlives else min(load.age / STEPS_BETWEEN_TRIES, 1.0)
        of_step = load.num_reqs * on_line(self._left_out, load.context)
        return {**seconds, 0: seconds[0] + share * of_step}

    def _hold(self, num_reqs: int, offer: Offer) -> int:
        """The best plan, or the one chosen before if that is as good."""
        best, held = offer.best(), self._chosen.get(num_reqs)
        if held in offer.seconds and not offer.is_better(best, held):
            return held
        self._chosen[num_reqs] = best
        return best

    def _try_drafts(self, load: Load, chosen: int, offer: Offer) -> int:
        """Where nothing is drafted, now and then the plan that was best before anything
        was seen: a step with one draft often takes nearly as long, and tells less."""
        # Requests get older, and a new one in the place of another lowers the mean.
        is_new, self._age = load.age < self._age, load.age
        if 0 not in offer.seconds or len(offer.seconds) == 1:
            return chosen
        if chosen:
            worth = offer.tokens[chosen] / offer.tokens[0]
            self._first.save(worth - offer.seconds[chosen] / offer.seconds[0])
            return chosen
        hoped = {plan: load.tokens(self._hoped[plan]) for plan in offer.seconds if plan}
        other = max(hoped, key=lambda plan: hoped[plan] / offer.seconds[plan])
        loss = max(0.0, offer.seconds[other] / offer.seconds[0] - 1.0)
        needed = loss * load.num_reqs / load.num_drafting
        tries, hope = self._first, self._hoped[other] - 1.0
        if not tries.go_on(loss, needed, hope, is_new, self.steps_held):
            return 0
        for chains in self.acceptance.chains(load.shares):
            if not tries.seen:
                chains.begin_block()
            elif tries.seen >= TRIAL_DRAFTS:
                chains.believe_block()
        return other

    def _try_another(self, load: Load, chosen: int, offer: Offer) -> int:
        """Now and then a larger plan: else nothing new is known of it.

        By turns the next larger one, the next larger tree, and the best of which it was
        not seen yet how long it takes. What shorter chains get needs no try: it is part
        of what the chosen one gets.
        """
        other = self._to_try(load.num_reqs, chosen, offer)
        if other is None:
            self._end_turn()
            return chosen
        held = self.steps_held
        steps = max(-(-TRIAL_DRAFTS // load.num_drafting), held)
        if self._turn == UNTIMED:
            steps = max(steps, TIMED_STEPS)
        if not self._tries.go_on(steps, offer.loss(other, chosen), held):
            return chosen
        if not self._tries.steps:
            self._end_turn()
        return other

    def _tries_none(self, load: Load, chosen: int, offer: Offer) -> bool:
        """Whether a step drafts nothing so that its seconds are known, once those of
        the chosen one are: what was measured at start tells the gain no better."""
        seen = self.served.seen(load.num_reqs)
        if not chosen or chosen not in seen or 0 not in offer.seconds:
            return False
        tries = self._undrafted[size_of(load.num_reqs)]
        if not tries.steps and 0 in self.served.seen(load.num_reqs, RECENT):
            return False
        return tries.go_on(TIMED_STEPS, offer.loss(0, chosen), self.steps_held)

    def _end_turn(self) -> None:
        self._turn = (self._turn + 1) % len(TURNS)

    def _to_try(self, num_reqs: int, chosen: int, offer: Offer) -> int | None:
        larger = sorted(plan for plan in offer.seconds if plan > chosen > 0)
        if self._turn == LARGER:
            return next(iter(larger), None)
        if self._turn == LARGER_TREE:
            return next((plan for plan in larger if plan in self._trees), None)
        if not (seen := self.served.seen(num_reqs)):
            return None  # yet, or nobody tells
        # Where a part of the drafts would be verified, it would still not be seen.
        whole = {plan for plan in offer.seconds if not offer.gains.get(plan)}
        return max(whole - seen - {chosen}, key=offer.per_second, default=None)

    def _log_choice(
        self, load: Load, chosen: int, expected: dict[int, float], seconds: Row
    ) -> None:
        """Now and then, if another plan is chosen: what, and what else there is."""
        if time.monotonic() < self._next_log or chosen == self._logged:
            return
        self._next_log, self._logged = time.monotonic() + LOG_SECONDS, chosen

        def said(plan: int) -> str:
            return f"{expected[plan]:.2f} tokens in {1e3 * seconds[plan]:.2f} ms"

        others = [f"{plan}: {said(plan)}" for plan in seconds if plan != chosen]
        logger.info(
            "Draft length %d for %d requests of %d tokens: %s each. Others: %s.",
            chosen,
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
            row = self._with_left_out(Load(num_reqs, num_reqs, context), row)
            best = Offer(expected, row, NO_GAINS).best()
            if not best or 0 not in row:
                return str(best)
            # As many tokens as steps without drafts give in its time.
            times = f"{1e3 * row[best]:.2f} ms, {1e3 * row[0]:.2f} ms"
            return f"{best} ({row[best] / row[0]:.2f}; {times})"

        return ", ".join(f"{n}: {said(n, row)}" for n, row in sorted(shortest.items()))
