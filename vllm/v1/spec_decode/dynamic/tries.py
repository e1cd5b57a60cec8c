# SPDX-License-Identifier: Apache-2.0
"""Steps that follow another plan now and then, to learn what it yields."""

from collections import defaultdict

from .served_times import LEAST_STEPS, ServedTimes, size_of

# What tries of drafting may cost while nothing is drafted: a share of all time, and of
# the time that drafts have saved, which adds up to `MOST_SAVED` steps at most; as much
# is granted when drafts are chosen for the first time.
FIRST_BUDGET, FIRST_SHARE, MOST_SAVED = 0.005, 0.1, 10.0
# Steps until the first try after drafts have stopped; doubled for each next one.
FIRST_WAIT = 8
# Such a try has the drafts that are best at this acceptance rate: in a step that is
# compute-bound long drafts often pay, and short ones never do.
GOOD_RATE = 0.85
TRIAL_DRAFTS = 16  # drafts after which a try that pays replaces the estimate
PATIENCE = 6  # most steps until it is known what was accepted

TIMED_STEPS = LEAST_STEPS + 2  # `StepIntervals` cannot time the first two of a try
RECENT = 0.5  # weight of served times below which a plan is timed again

# In the steps where a try begins and ends, the numbers of drafted and verified tokens
# differ, for which there may be no CUDA graph. This is the assumed extra time of both
# together, in steps.
SWITCH_COST = 0.6


class Tries:
    """Steps that follow another plan now and then, within a share of all time.

    Args:
        budget: the share.
        first: the share until the first try; None: the same.
    """

    def __init__(self, budget: float, first: float | None = None):
        self.budget, self._share = budget, first or budget
        self.allowance = 0.0  # what a try may cost now, in steps
        self.steps = 0  # left of the present try

    def go_on(self, steps: int, loss: float, held: int = 1, elapsed: int = 1) -> bool:
        """Whether the next step is part of a try.

        Args:
            steps: length of a try.
            loss: cost of each of its steps, in steps of the chosen plan.
            held: for how many steps a choice holds.
            elapsed: steps since the last call.
        """
        if not self.steps:
            self.allowance += self._share * elapsed
            if self.allowance < SWITCH_COST + steps * loss:
                return False
            self.allowance, self.steps, self._share = 0.0, steps, self.budget
        self.steps = max(self.steps - held, 0)
        return True


class TimingTries:
    """Tries of a plan that only time its steps, separately for each batch size.

    Args:
        served: the times that were seen.
        budget: see `Tries`; it begins anew at each batch size.
        first: likewise.
    """

    def __init__(self, served: ServedTimes, budget: float, first: float):
        self._served = served
        self._tries: defaultdict[int, Tries] = defaultdict(lambda: Tries(budget, first))

    def go_on(
        self, num_reqs: int, plan: int, loss: float, held: int = 1, elapsed: int = 1
    ) -> bool:
        """Whether the next step follows `plan`, unless that was timed recently; for the
        other arguments see `Tries.go_on`."""
        tries = self._tries[size_of(num_reqs)]
        if not tries.steps and plan in self._served.seen(num_reqs, RECENT):
            return False
        return tries.go_on(TIMED_STEPS, loss, held, elapsed)


class FirstDrafts:
    """Tries of drafting while nothing is drafted, since nothing is learned otherwise.

    A try begins with one step, which shows much: if nothing is accepted the try ends.
    It continues only as long as its drafts pay, and what it has cost is what they have
    not paid for. So tries are short, and there can be many at the same cost
    (observation control, as in data-efficient quickest change detection, Banerjee and
    Veeravalli 2012).

    If drafts have paid before, they may pay again: for a new request, or further on in
    the same text, whose first tokens are often the hardest to predict. So part of the
    time that they saved is spent on tries when new requests begin, and on others soon
    after drafts have stopped, at intervals that double (exponential backoff).

    Args:
        at_first: what tries may cost until drafts are chosen or verified otherwise, in
            steps without drafts.

    Attributes:
        seen: verified drafts of the present or last try, one per request and step.
    """

    def __init__(self, at_first: float = 0.0) -> None:
        # In steps without drafts.
        self._allowance, self._saved, self._at_first = 0.0, 0.0, at_first
        self._granted = MOST_SAVED
        self._wait, self._waited = FIRST_WAIT, 0  # in steps
        self._patience = self._accepted = 0
        self._charged = 0.0  # for the first step of the present try
        self.seen = 0

    def observe(self, num_accepted: int) -> None:
        """Records one request's verified drafts."""
        self.seen += 1
        self._accepted += num_accepted
        if not self.is_going_on:
            self._at_first = 0.0  # drafts of another plan are known

    def save(self, steps: float) -> None:
        """Records a chosen step with drafts, and what it is expected to save."""
        saved = self._saved + self._granted + FIRST_SHARE * steps
        self._granted = self._at_first = 0.0
        self._saved = max(0.0, min(saved, MOST_SAVED))
        self._wait, self._waited = FIRST_WAIT, 0
        self._patience = 0

    @property
    def is_going_on(self) -> bool:
        """Whether a try continues, or waits for what is accepted."""
        return self._patience > 0

    def go_on(
        self,
        loss: float,
        needed: float,
        hoped: float,
        is_new: bool,
        held: int = 1,
        elapsed: int = 1,
    ) -> bool:
        """Whether the next step drafts.

        Args:
            loss: cost of a step whose drafts are all rejected, in steps without drafts.
            needed: accepted drafts per request and step from which on drafting pays.
            hoped: the prior of that number, which counts as one request's outcome.
            is_new: whether a request has just begun.
            held: for how many steps a choice holds.
            elapsed: steps since the last call.
        """
        self._allowance += FIRST_BUDGET * elapsed
        self._waited += elapsed
        if self._patience and self.seen:
            if self._accepted and self._accepted + hoped > needed * (self.seen + 1):
                return True
            self._patience = 0
            if self._accepted:  # they have paid for a part of what the try has cost
                paid = self._accepted / (needed * self.seen)
                self._allowance += self._charged * min(paid, 1.0)
        self._patience = max(self._patience - elapsed, 0)
        return not self._patience and self._begin(loss * held, is_new)

    def _begin(self, loss: float, is_new: bool) -> bool:
        cost = SWITCH_COST + loss
        is_due = is_new or self._waited >= self._wait
        if is_due and self._saved >= cost:
            self._saved -= cost
        elif self._allowance >= cost:
            self._allowance -= cost
        elif is_due and self._at_first >= cost:
            self._at_first -= cost
        else:
            return False
        self._patience, self.seen, self._accepted = PATIENCE, 0, 0
        self._charged = loss
        self._wait, self._waited = 2 * self._wait, 0
        return True
