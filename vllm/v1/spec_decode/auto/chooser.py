# SPDX-License-Identifier: Apache-2.0
"""Chooses the plan that promises the most tokens per second.

A step of n requests, of which m can use drafts, yields m * E(p) + n - m tokens if it
verifies plan p, and takes seconds[p].
"""

from collections.abc import Mapping
from typing import NamedTuple

from vllm.logger import init_logger

from . import Faded
from .acceptance import (
    ALL_GREEDY,
    NO_TREES,
    NONE_DRAFT,
    Acceptance,
    ChainAcceptance,
    Shares,
    Verified,
)
from .explore import TIMED_STEPS, TRIAL_DRAFTS, Explorer
from .times import TRIMMED, Row, ServedTimes, StepTimes, Table, plausible
from .verify import PartialSteps, Verifier

logger = init_logger(__name__)

# Another plan is chosen only if it promises this much more throughput.
HYSTERESIS = 0.01
# A trial of drafting has the drafts that are best at this acceptance rate: in a step
# that is compute-bound long drafts often pay, and short ones never do.
GOOD_RATE = 0.85
# Share of the best plan's throughput that another one must promise to be tried.
NEAR = 0.75
GAIN_SECONDS = 10.0  # seconds of steps after which one counts half in the reported gain
FIRST_TIMED = 2  # from this turn on, trials are to be timed


class Load(NamedTuple):
    """The batch of a step.

    Attributes:
        num_reqs: requests.
        num_drafting: those of them that can use drafts.
        context: mean tokens of a request so far.
        has_grammar: whether any request has one: then nothing is trimmed.
        age: mean output tokens of a request so far.
        shares: of the kinds of requests that can use drafts.
    """

    num_reqs: int
    num_drafting: int
    context: float
    has_grammar: bool = False
    age: float = float("inf")
    shares: Shares = ALL_GREEDY

    def tokens(self, expected: float) -> float:
        """Tokens of the step, if a request with drafts gets `expected`."""
        return self.num_reqs + self.num_drafting * (expected - 1.0)


class Choice(NamedTuple):
    """A plan, and the expected tokens and seconds of a step; those of the same step
    without drafts, if that is a plan, too."""

    plan: int
    tokens: float
    seconds: float
    undrafted: tuple[float, float] | None = None


class Offer(NamedTuple):
    """Expected tokens and seconds of a step, by plan."""

    tokens: Mapping[float, float]
    seconds: Row
    gains: Mapping[int, float]  # what trimming adds, as a share; `tokens` include it

    def per_second(self, plan: float) -> float:
        return self.tokens[plan] / self.seconds[plan]

    def loss(self, other: int, chosen: int) -> float:
        """What a step of another plan costs, in steps of the chosen one."""
        value = self.tokens[other] / self.tokens[chosen]
        return max(0.0, self.seconds[other] / self.seconds[chosen] - value)

    def saved(self, plan: int) -> float:
        """What a step of a plan saves, in steps without drafts."""
        return self.tokens[plan] / self.tokens[0] - self.seconds[plan] / self.seconds[0]

    def is_more(self, plan: float, other: float) -> bool:
        return self.per_second(plan) >= self.per_second(other) * (1 + HYSTERESIS)

    def best(self) -> int:
        """The plan with the most tokens per second; if it is trimmed, the shortest
        trimmed one that is about as good, since shorter ones are underestimated where
        runs are not followed."""
        best = max(self.seconds, key=self.per_second)
        if not self.gains.get(best):
            return int(best)
        trimmed = (plan for plan in self.seconds if self.gains.get(plan))
        return int(min(plan for plan in trimmed if not self.is_more(best, plan)))


class Chooser:
    """Chooses drafts per request, by step times and acceptance.

    Args:
        num_speculative_tokens: K, the longest chain.
        measured: step times of each plan to choose from; if empty, every step drafts
            the longest chain.
        trees: nodes of the trees to choose from, and their depths.
        most_rows: the most rows of a step with trees.
        partial: steps that verify part of their drafts; None: none does.
        interval: steps for which each choice holds, at least.

    Attributes:
        choice: the last one; None before the first, or without times.
        may_hold: whether it is good for some more steps: it is not part of a trial, and
            enough is known of the requests.
        gain: expected throughput of recent steps over that without drafts, as a mean
            over seconds.
        fixed: what every step drafts instead, for measurements; None: what is best.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        measured: Table,
        trees: Mapping[int, int] = NO_TREES,
        most_rows: int = 256,
        partial: PartialSteps | None = None,
        interval: int = 1,
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self.times = StepTimes(measured, num_speculative_tokens)
        self.served = ServedTimes()
        self.acceptance = Acceptance(num_speculative_tokens, trees)
        self.verifier: Verifier | None = None
        if partial is not None:
            self.verifier = Verifier(self.times, partial, self.served, self.acceptance)
        self.explorer = Explorer()
        self.choice: Choice | None = None
        self.may_hold = False
        self.fixed: int | None = None
        self.gain = Faded(GAIN_SECONDS)
        self._trees, self._most_rows, self._interval = trees, most_rows, interval
        self._hoped = self.acceptance.expected_tokens()  # by the prior alone
        depths = {plan: trees.get(plan, plan) for plan in self._hoped}
        self._if_good = {  # tokens of a step at `GOOD_RATE`
            plan: (1.0 - GOOD_RATE ** (depth + 1)) / (1.0 - GOOD_RATE)
            for plan, depth in depths.items()
        }
        self._chosen: dict[int, int] = {}  # by number of requests
        self._shares = ALL_GREEDY  # of the last step
        self._age = float("inf")
        self._tried: list[ChainAcceptance] = []  # whose blocks the present trial began
        self._turn = 0
        self._log_initial()

    # What is learned.

    def observe(self, drafts: Verified, kind: int = 0, request_id: str = "") -> None:
        """Records one request's verified drafts."""
        self.acceptance.observe(drafts, kind, request_id)
        self.explorer.observe(len(drafts.accepted))

    def observe_seconds(
        self,
        num_reqs: int,
        context: float,
        plan: int,
        seconds: float,
        budget: int | None = None,
    ) -> None:
        """Records the time of a step that drafted as many as it verified; for `budget`
        see `verify`."""
        if not self.times:
            return
        expected = self.times.seconds(num_reqs, context).get(plan)
        if budget is not None and self.verifier is not None:
            load = num_reqs, context
            expected, plan = self.verifier.seconds(*load, plan, budget), TRIMMED
        if expected is not None:
            self.served.observe(num_reqs, plan, seconds / expected)

    # What is chosen.

    def choose(self, load: Load, elapsed: int = 1) -> int:
        """Drafts per request in the next steps.

        Args:
            load: of the next step.
            elapsed: steps since the last call, which followed its choice.
        """
        self.acceptance.end_steps(self._shares, elapsed)
        if self.fixed is not None:
            self.choice = None
            return self.fixed
        if not self.times:
            return self.num_speculative_tokens
        self._shares = load.shares if load.num_drafting else NONE_DRAFT
        self._add_to_gain(elapsed)
        offer = self._offer(load)
        if load.num_drafting:
            best = self._hold(load.num_reqs, offer)
            chosen = self._explore(load, best, offer, elapsed)
            kinds = self.acceptance.chains(load.shares)
            is_known = all(chains.is_known for chains in kinds)
            self.may_hold = is_known and self.explorer.trial is None
        else:  # no request can use drafts
            chosen, self.may_hold = int(min(offer.seconds)), True
        undrafted = None
        if 0 in offer.seconds:
            undrafted = offer.tokens[0], offer.seconds[0]
        self.choice = Choice(
            chosen, offer.tokens[chosen], offer.seconds[chosen], undrafted
        )
        return chosen

    def verify(self, num_reqs: int, num_drafts: int, load: Load) -> int | None:
        """Drafts to verify in a step whose requests all have a chain of `num_drafts`
        with known acceptance probabilities; None: all of them."""
        if self.verifier is None or not self.verifier.may_trim(load):
            return None
        trial = self.explorer.trial
        if trial is not None and trial.is_whole and trial.plan == num_drafts:
            return None
        return self.verifier.best(num_reqs, num_drafts, load).num_drafts

    def _add_to_gain(self, elapsed: int) -> None:
        """Adds steps of the last choice to the reported gain."""
        if self.choice is None or self.choice.undrafted is None:
            return
        tokens, seconds = self.choice.undrafted
        spent, gained = self.choice.seconds, self.choice.tokens / tokens
        self.gain.fade(elapsed * spent)
        self.gain.add(gained * seconds / spent, elapsed * spent)

    def _offer(self, load: Load) -> Offer:
        """Without trees of too many rows to pay."""
        seconds = self.times.seconds(load.num_reqs, load.context)
        seconds = self.served.correct(load.num_reqs, seconds)
        seconds = plausible(seconds, self.num_speculative_tokens)
        seconds = {
            plan: each
            for plan, each in seconds.items()
            if plan not in self._trees or load.num_reqs * (plan + 1) <= self._most_rows
        }
        expected = self.acceptance.expected_tokens(load.shares)
        gains: Mapping[int, float] = {}
        if self.verifier is not None:
            gains = self.verifier.gains(load, seconds)
        tokens = {
            plan: load.tokens(expected[plan]) * (1.0 + gains.get(plan, 0.0))
            for plan in seconds
        }
        return Offer(tokens, seconds, gains)

    def _hold(self, num_reqs: int, offer: Offer) -> int:
        """The best plan, or the one chosen before if it is about as good."""
        best, held = offer.best(), self._chosen.get(num_reqs)
        is_shorter = offer.gains.get(best) and best < (held or 0)
        if held in offer.seconds and not (is_shorter or offer.is_more(best, held)):
            return held
        self._chosen[num_reqs] = best
        return best

    # What is tried.

    def _explore(self, load: Load, best: int, offer: Offer, elapsed: int) -> int:
        """The plan of the present trial, or of one that begins, or the best plan."""
        # Requests get older, and a new one in the place of another lowers the mean.
        is_new, self._age = load.age < self._age, load.age
        is_drafting = best > 0 and 0 in offer.seconds
        self.explorer.elapse(elapsed, offer.saved(best) if is_drafting else None)
        trial = self.explorer.trial
        if trial is not None and (trial.needed is None) == (best == 0):
            self.explorer.trial = None  # it began in the place of another plan
        plan = self.explorer.go_on(elapsed)
        if plan is None:
            begin = self._try_another if best else self._try_drafts
            return begin(load, best, offer, is_new)
        if trial.needed is not None and trial.seen >= TRIAL_DRAFTS:
            for chains in self._tried:
                chains.believe_block()
            self._tried = []
        return plan if plan in offer.seconds else best

    def _try_drafts(self, load: Load, _: int, offer: Offer, is_new: bool) -> int:
        """If nothing is drafted, tries what is best if most drafts are accepted. Few
        drafts take less time, but cannot show that many would pay."""
        plans = [plan for plan in offer.seconds if plan]
        if not plans:
            return 0
        other = max(
            plans, key=lambda p: load.tokens(self._if_good[p]) / offer.seconds[p]
        )
        loss = max(0.0, offer.seconds[other] / offer.seconds[0] - 1.0)
        needed = loss * load.num_reqs / load.num_drafting
        hoped = self._hoped[other] - 1.0
        cost = loss * self._interval
        if not self.explorer.begin_drafting(other, cost, needed, hoped, is_new):
            return 0
        # Only of kinds that are there now: the blocks of others would be older.
        self._tried = self.acceptance.chains(load.shares)
        for chains in self._tried:
            chains.begin_block()
        return other

    def _try_another(self, load: Load, best: int, offer: Offer, _: bool) -> int:
        """Tries another plan, by turns of what there is to learn."""
        to_try = self._to_try(load, best, offer)
        for turn in range(self._turn, self._turn + len(to_try)):
            self._turn = turn % len(to_try)
            if (other := to_try[self._turn]) is not None:
                break
        else:
            return best
        is_whole = other == best
        loss = offer.gains[best] if is_whole else offer.loss(other, best)
        steps = -(-TRIAL_DRAFTS // load.num_drafting)
        if self._turn >= FIRST_TIMED:
            steps = TIMED_STEPS
        steps = max(steps, self._interval)
        if not self.explorer.begin(other, steps, loss, is_whole):
            return best
        self._turn = (self._turn + 1) % len(to_try)
        return other

    def _to_try(self, load: Load, best: int, offer: Offer) -> list[int | None]:
        """A plan for each turn, of which something is to be learned, among those that
        are nearly as good.

        The next larger plan, and the next larger tree: acceptance of chains that are no
        deeper needs no trial. Then those whose steps are to be timed: the best plan
        that was not, the chosen plan with all drafts verified, and drafting nothing,
        since times measured at start could be wrong.
        """
        least = NEAR * offer.per_second(best)
        near = {plan for plan in offer.seconds if offer.per_second(plan) >= least}
        larger = sorted(plan for plan in near if plan > best)
        next_larger = next(iter(larger), None)
        next_tree = next((plan for plan in larger if plan in self._trees), None)
        found = [next_larger, None if next_tree == next_larger else next_tree]
        seen, trimmed = self.served.seen(load.num_reqs), bool(offer.gains.get(best))
        if not seen:  # nothing was timed yet, or steps cannot be timed
            return [*found, None, None, None]
        # A plan that would be trimmed is not timed as itself, see `TRIMMED`.
        untimed = {plan for plan in offer.seconds if not offer.gains.get(plan)}
        untimed -= {*seen, best}
        found.append(max(untimed & near, key=offer.per_second, default=None))
        found.append(best if trimmed and best not in seen else None)
        found.append(0 if 0 in untimed and (trimmed or best in seen) else None)
        return found

    # What is logged.

    def _named(self, plan: int) -> str:
        return f"tree of {plan}" if plan in self._trees else f"{plan}"

    def _log_initial(self) -> None:
        if not self.times:
            logger.warning(
                "Every draft has %d tokens: no step times were measured to choose by.",
                self.num_speculative_tokens,
            )
            return
        first = next(iter(self.times.measured.values()))
        lengths = (f"{n}: {self._initial(row)}" for n, row in first.items())
        logger.info(
            "Initial draft lengths (batch size: K, break-even acceptance length, step "
            "with and without drafts): %s.",
            ", ".join(lengths),
        )

    def _initial(self, row: Row) -> str:
        best = Offer(self._hoped, row, {}).best()
        if not best or 0 not in row:
            return self._named(best)
        with_drafts, without = 1e3 * row[best], 1e3 * row[0]
        ratio = with_drafts / without
        return (
            f"{self._named(best)} ({ratio:.2f}, {with_drafts:.2f} and {without:.2f} ms)"
        )
