# SPDX-License-Identifier: Apache-2.0
"""Chooses the plan that promises the most tokens per second, and tries others.

A step of n requests, of which m can use drafts, yields m * E(p) + n - m tokens if it
verifies plan p, and takes seconds[p].

**Trials.** What is never drafted is never learned, and what never runs is never timed.
So steps follow other plans now and then, within a share of all time. While nothing is
drafted, a trial begins with one step, which shows much: if nothing is accepted it ends.
It goes on only as long as its drafts pay. If drafts have paid they may pay again, so
part of the time that they saved is credit for such trials.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from vllm.config.drafter.length import MAX_TREE_ROWS
from vllm.logger import init_logger

from .acceptance import (
    ALL_GREEDY,
    NO_TREES,
    NONE_DRAFT,
    Acceptance,
    Faded,
    Shares,
    Verified,
)
from .times import LEAST_STEPS, Row, ServedTimes, StepTimes, Table, plausible, size_of
from .verify import PartialSteps, Verifier

logger = init_logger(__name__)

GAIN_SECONDS = 10.0  # seconds of steps after which one counts half in the reported gain
# Share of all time that trials may cost. Halved, drafts that pay again are found later;
# doubled, 1 % is lost where they never do.
BUDGET = 0.005
# Share of the time saved by drafts that is credit for trials while nothing is drafted,
# and the most of it, and of the budget, in steps. As much credit is there at first.
# Halved, requests whose drafts pay, among others, get half as many trials; doubled, the
# others may lose a fifth of what these gain.
CREDIT_SHARE, MOST_CREDIT = 0.1, 10.0
# Steps between such trials, and until it is known what was accepted. Halved, outcomes
# may come too late with async scheduling; doubled, drafts begin as much later.
WAIT = 8
# Of a trial, in steps: there is no graph where plans change. Halved or doubled, trials
# cost more or less than their share by as much.
SWITCH_COST = 0.5
TIMED_STEPS = LEAST_STEPS + 2  # the first two cannot be timed


class Load(NamedTuple):
    """The batch of a step.

    Attributes:
        num_reqs: requests.
        num_drafting: those of them that can use drafts.
        context: mean tokens of a request so far.
        has_grammar: whether any request has one: then nothing is trimmed.
        shares: of the kinds of requests that can use drafts.
    """

    num_reqs: int
    num_drafting: int
    context: float
    has_grammar: bool = False
    shares: Shares = ALL_GREEDY

    def tokens(self, expected: float) -> float:
        """Tokens of the step, if a request with drafts gets `expected`."""
        return self.num_reqs + self.num_drafting * (expected - 1.0)


class Offer(NamedTuple):
    """Expected tokens and seconds of a step, by plan."""

    tokens: Mapping[float, float]
    seconds: Row

    def per_second(self, plan: float) -> float:
        return self.tokens[plan] / self.seconds[plan]

    def saved(self, plan: int, other: int) -> float:
        """What a step of a plan saves, in steps of another one."""
        value = self.tokens[plan] / self.tokens[other]
        return value - self.seconds[plan] / self.seconds[other]

    def best(self) -> int:
        return int(max(self.seconds, key=self.per_second))


@dataclass
class Trial:
    """A trial that goes on.

    Attributes:
        plan: what it follows.
        steps: left; of a trial of drafting, until it is known what was accepted.
        needed: accepted drafts per verified draft of a request from which on drafting
            pays; None: the trial runs all its steps.
        seen, accepted: verified drafts, one per request and step, and accepted tokens.
    """

    plan: int
    steps: int
    needed: float | None = None
    seen: int = 0
    accepted: int = 0

    def goes_on(self, elapsed: int) -> bool:
        """Counts steps."""
        self.steps -= elapsed
        if self.needed is None or not self.seen:
            return self.steps > 0
        return self.accepted > self.needed * self.seen


class Chooser:
    """Chooses drafts per request, by step times and acceptance.

    Args:
        num_speculative_tokens: K, the longest chain.
        measured: step times of each plan to choose from; if empty, every step drafts
            the longest chain.
        trees: nodes of the trees to choose from, and their depths.
        partial: steps that verify part of their drafts; None: none does.
        interval: steps for which each choice holds, at least.

    Attributes:
        plan: the last one that was chosen; None before the first, or if it is fixed.
        gain: expected throughput of recent steps over that without drafts, as a mean
            over seconds.
        fixed: what every step drafts instead, without times, and for measurements;
            None: what is best.
        trial: the one that goes on; None: the choice is good for some more steps.
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        measured: Table,
        trees: Mapping[int, int] = NO_TREES,
        partial: PartialSteps | None = None,
        interval: int = 1,
    ):
        self.times = StepTimes(measured, num_speculative_tokens)
        self.served = defaultdict[int, ServedTimes](ServedTimes)  # by batch size
        self.acceptance = Acceptance(num_speculative_tokens, trees)
        self.verifier = partial and Verifier(self.times, partial, self.acceptance)
        self.plan: int | None = None
        self.fixed = None if measured else num_speculative_tokens
        self.trial: Trial | None = None
        self.gain = Faded(GAIN_SECONDS)
        self._trees, self._interval = trees, interval
        self._shares = ALL_GREEDY  # of the last step
        self._last = 0.0, 0.0  # its seconds, and its gain; zeros: not known
        # For trials, in steps of the plan chosen else: of other plans, and of drafts
        # while nothing is drafted; and steps since the last one of these.
        self._budget, self._credit, self._waited = 0.0, MOST_CREDIT, 0
        self._turn = 0
        if not measured:
            logger.warning(
                "Every draft has %d tokens: no step times were measured to choose by.",
                num_speculative_tokens,
            )

    # What is learned.

    def observe(self, drafts: Verified, kind: int = 0) -> None:
        """Records one request's verified drafts."""
        self.acceptance.observe(drafts, kind)
        if self.trial is not None:
            self.trial.seen += 1
            self.trial.accepted += len(drafts.accepted)

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
        expected = self.times.seconds(num_reqs, context).get(plan)
        if expected is None:
            return
        if budget is not None and self.verifier is not None:
            rows = num_reqs + budget
            expected = float(self.verifier.seconds(num_reqs, context, plan, rows))
        self.served[size_of(num_reqs)].observe(plan, seconds / expected)

    # What is chosen.

    def choose(self, load: Load, elapsed: int = 1) -> int:
        """Drafts per request in the next steps.

        Args:
            load: of the next step.
            elapsed: steps since the last call, which followed its choice.
        """
        self.acceptance.end_steps(self._shares, elapsed)
        (seconds, gain), self._last = self._last, (0.0, 0.0)
        self.gain.fade(elapsed * seconds)
        self.gain.add(elapsed * seconds * gain, elapsed * seconds)
        if self.fixed is not None:
            self.plan = None
            return self.fixed
        self._shares = load.shares if load.num_drafting else NONE_DRAFT
        offer = self._offer(load)
        if load.num_drafting:
            self.plan = self._explore(load, offer.best(), offer, elapsed)
        else:  # no request can use drafts
            self.plan, self.trial = int(min(offer.seconds)), None
        # Until a step without drafts was served, its time is that measured at start.
        if 0 in offer.seconds and 0 in self.served[size_of(load.num_reqs)].seen():
            gain = offer.per_second(self.plan) / offer.per_second(0)
            self._last = offer.seconds[self.plan], gain
        return self.plan

    def _offer(self, load: Load) -> Offer:
        """Without trees of too many rows to pay. Tokens include what trimming adds."""
        measured = self.times.seconds(load.num_reqs, load.context)
        corrected = self.served[size_of(load.num_reqs)].correct(measured)
        seconds = {
            plan: each
            for plan, each in plausible(corrected, self.times.depth).items()
            if plan not in self._trees or load.num_reqs * (plan + 1) <= MAX_TREE_ROWS
        }
        expected = self.acceptance.expected_tokens(load.shares)
        gains = self.verifier.gains(load, seconds) if self.verifier else {}
        tokens = {
            plan: load.tokens(expected[plan]) * (1.0 + gains.get(plan, 0.0))
            for plan in seconds
        }
        return Offer(tokens, seconds)

    # What is tried.

    def _explore(self, load: Load, best: int, offer: Offer, elapsed: int) -> int:
        """The plan of the present trial, or of one that begins, or the best plan."""
        earned = BUDGET * elapsed
        self._budget = min(self._budget + earned, MOST_CREDIT)
        if best and 0 in offer.seconds:
            earned += CREDIT_SHARE * offer.saved(best, 0) * elapsed
        self._credit = min(self._credit + earned, MOST_CREDIT)
        self._waited = 0 if best else self._waited + elapsed
        # It ends early if it began in the place of another plan.
        trial = self.trial
        is_in_place = trial is not None and (trial.needed is None) == (best > 0)
        if is_in_place and trial.goes_on(elapsed) and trial.plan in offer.seconds:
            # While it waits for its first outcomes, a trial of drafting drafts nothing.
            return trial.plan if trial.needed is None or trial.seen else 0
        begin = self._try_another if best else self._try_drafts
        self.trial = begin(load, best, offer)
        return best if self.trial is None else self.trial.plan

    def _try_drafts(self, load: Load, _: int, offer: Offer) -> Trial | None:
        """If nothing is drafted, tries what is best if all drafts are accepted. Few
        drafts take less time, but cannot show that many would pay."""
        plans = [plan for plan in offer.seconds if plan]
        if not plans or self._waited < WAIT:
            return None
        most = {plan: load.tokens(1.0 + self._trees.get(plan, plan)) for plan in plans}
        other = int(max(plans, key=lambda plan: most[plan] / offer.seconds[plan]))
        loss = max(0.0, offer.seconds[other] / offer.seconds[0] - 1.0)
        cost = SWITCH_COST + loss * self._interval
        if self._credit < cost:
            return None
        self._credit, self._waited = self._credit - cost, 0
        needed = loss * load.num_reqs / load.num_drafting
        return Trial(other, WAIT, needed)

    def _try_another(self, load: Load, best: int, offer: Offer) -> Trial | None:
        """Tries another plan, by turns, if the budget suffices: the next larger one,
        and the next larger tree, since acceptance of chains that are no deeper needs no
        trial; and drafting nothing, so that the gain is known."""
        larger = [plan for plan in offer.seconds if plan > best]
        trees = [plan for plan in larger if plan in self._trees]
        others = [*larger[:1], *(plan for plan in trees[:1] if plan != larger[0])]
        seen = self.served[size_of(load.num_reqs)].seen()
        if seen and 0 in offer.seconds and 0 not in seen:  # without any, none is timed
            others.append(0)
        if not others:
            return None
        other = int(others[self._turn % len(others)])
        steps = max(TIMED_STEPS, self._interval)
        cost = SWITCH_COST + steps * max(0.0, -offer.saved(other, best))
        if cost > MOST_CREDIT:  # never within the budget
            self._turn += 1
        if self._budget < cost:
            return None
        self._budget -= cost
        self._turn += 1
        return Trial(other, steps)
