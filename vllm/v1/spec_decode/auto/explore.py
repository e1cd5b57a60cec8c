# SPDX-License-Identifier: Apache-2.0
"""Trials: steps that follow another plan than the best one, to learn what it yields.

What is never drafted is never learned, and what is never run is never timed. All trials
share one budget, a share of all time.

**While nothing is drafted** a trial begins with one step, which shows much: if nothing
is accepted it ends. It goes on only as long as its drafts pay, and what they pay for is
given back, so trials are short, and there can be many at the same cost. If drafts have
paid before they may pay again, for a new request or further on in the same text. So
part of the time that they saved is credit for trials when new requests begin, and for
others soon after drafts have stopped, at intervals that double (exponential backoff).
"""

from dataclasses import dataclass

from .times import LEAST_STEPS

# Share of all time that trials may cost.
BUDGET = 0.005
# Share of the time saved by drafts that is credit for trials while nothing is drafted,
# and the most of it, and of the budget, in steps. As much credit is there at first.
CREDIT_SHARE, MOST_CREDIT = 0.1, 10.0
FIRST_WAIT = 8  # steps from when drafts stop to the first such trial
TRIAL_DRAFTS = 16  # drafts that a trial is to have verified
PATIENCE = 6  # most steps until it is known what was accepted
TIMED_STEPS = LEAST_STEPS + 2  # `times.Intervals` cannot time the first two
# Assumed extra time of a trial, in steps: where it begins and ends, the numbers of
# drafted and verified tokens differ, for which there may be no CUDA graph.
SWITCH_COST = 0.6


@dataclass
class Trial:
    """A trial that goes on.

    Attributes:
        plan: what it follows.
        steps: left; of a trial of drafting, until it is known what was accepted.
        is_whole: whether all drafts are verified where the plan would be trimmed.
        needed: accepted drafts per verified draft of a request from which on drafting
            pays; None: the trial runs all its steps.
        hoped: the prior of that number, which counts as one outcome.
        cost: of its first step.
        seen, accepted: verified drafts, one per request and step, and accepted tokens.
    """

    plan: int
    steps: int
    is_whole: bool = False
    needed: float | None = None
    hoped: float = 0.0
    cost: float = 0.0
    seen: int = 0
    accepted: int = 0


class Explorer:
    """Begins trials within the budget; amounts are in steps of the plan chosen else."""

    def __init__(self) -> None:
        self.trial: Trial | None = None
        self._budget, self._credit = 0.0, MOST_CREDIT
        self._wait, self._waited = FIRST_WAIT, 0

    def elapse(self, steps: int, saved: float | None) -> None:
        """Records steps.

        Args:
            saved: what the drafts of each are expected to save; None: nothing was
                drafted.
        """
        self._budget = min(self._budget + BUDGET * steps, MOST_CREDIT)
        self._waited += steps
        if saved is not None:
            credit = self._credit + CREDIT_SHARE * saved * steps
            self._credit = max(0.0, min(credit, MOST_CREDIT))
            self._wait, self._waited = FIRST_WAIT, 0

    def observe(self, num_accepted: int) -> None:
        """Records one request's verified drafts."""
        if self.trial is not None:
            self.trial.seen += 1
            self.trial.accepted += num_accepted

    def begin(self, plan: int, steps: int, loss: float, is_whole: bool) -> bool:
        """Begins a trial of so many steps, if the budget suffices.

        Args:
            loss: cost of each step.
            is_whole: see `Trial`.
        """
        cost = SWITCH_COST + steps * loss
        if self._budget < cost:
            return False
        self._budget -= cost
        self.trial = Trial(plan, steps, is_whole)
        return True

    def begin_drafting(
        self, plan: int, loss: float, needed: float, hoped: float, is_new: bool
    ) -> bool:
        """Begins a trial of drafting while nothing is drafted.

        Args:
            loss: cost of the first steps, if their drafts are all rejected.
            needed, hoped: see `Trial`.
            is_new: whether a request has just begun.
        """
        cost = SWITCH_COST + loss
        is_due = is_new or self._waited >= self._wait
        if is_due and self._credit >= cost:
            self._credit -= cost
        elif self._budget >= cost:
            self._budget -= cost
        else:
            return False
        self._wait, self._waited = 2 * self._wait, 0
        self.trial = Trial(plan, PATIENCE, False, needed, hoped, loss)
        return True

    def go_on(self, elapsed: int) -> int | None:
        """The plan of the next step, if the present trial goes on; it ends otherwise.

        A trial of drafting that waits for its first outcomes goes on with plan 0.
        """
        trial = self.trial
        if trial is None:
            return None
        if trial.needed is None:
            trial.steps -= elapsed
            if trial.steps > 0:
                return trial.plan
        elif trial.seen:
            if self._pays(trial):
                return trial.plan
        else:
            trial.steps -= elapsed
            if trial.steps > 0:
                return 0
        self.trial = None
        return None

    def _pays(self, trial: Trial) -> bool:
        needed = trial.needed or 0.0
        if not trial.accepted:
            return False
        if trial.accepted + trial.hoped > needed * (trial.seen + 1):
            return True
        paid = trial.accepted / (needed * trial.seen)
        self._budget += trial.cost * min(paid, 1.0)
        return False
