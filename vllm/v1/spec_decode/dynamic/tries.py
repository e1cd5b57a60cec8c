# SPDX-License-Identifier: Apache-2.0
"""Steps that are served otherwise now and then, to see what they would come to."""

# A share of all time that it may cost to draft where nothing is drafted, and of the
# time that drafts have saved, up to so many steps.
FIRST_BUDGET, FIRST_SHARE, MOST_SAVED = 0.005, 0.1, 10.0
TRIAL_DRAFTS = 16  # drafts that pay are believed after so many
PATIENCE = 6  # steps at most until it is known what was accepted

# In the steps where a try begins and ends, what is drafted and what is verified differ
# in length, for which there may be no CUDA graph: so much more time, in steps, is
# reckoned for both together.
SWITCH_COST = 0.6


class Tries:
    """Steps that follow another plan now and then, within a share of all time.

    Args:
        budget: the share.
        allowance: what a try may cost by now, in steps.
    """

    def __init__(self, budget: float, allowance: float = 0.0):
        self.budget, self.allowance = budget, allowance
        self.steps = 0  # left of the present one

    def go_on(self, steps: int, loss: float, held: int) -> bool:
        """Whether the next step is of a try.

        Args:
            steps: of a try.
            loss: of each of them, in steps.
            held: for how many steps a choice holds.
        """
        if not self.steps:
            self.allowance += self.budget * held
            if self.allowance < SWITCH_COST + steps * loss:
                return False
            self.allowance, self.steps = 0.0, steps
        self.steps = max(self.steps - held, 0)
        return True


class FirstDrafts:
    """Tries to draft where nothing is drafted, and nothing is learnt otherwise.

    One step tells much: of drafts that are never accepted none was, and the try ends.
    It goes on only as long as its drafts pay. So tries are short, and many for their
    cost (observation control, as in data-efficient quickest change detection, Banerjee
    and Veeravalli 2012).

    Where drafts have paid before, they may for a new request: so a part of the time
    that they saved is spent on requests as they come.

    Attributes:
        seen: verified drafts of the present try, or the last one, by requests.
    """

    def __init__(self) -> None:
        self._allowance = self._saved = 0.0  # in steps without drafts
        self._patience = self._accepted = 0
        self.seen = 0

    def observe(self, num_accepted: int) -> None:
        """Takes in one request's verified drafts."""
        self.seen += 1
        self._accepted += num_accepted

    def save(self, steps: float) -> None:
        """Takes in a step with drafts that is chosen, by what it is thought to save."""
        saved = self._saved + FIRST_SHARE * steps
        self._saved = max(0.0, min(saved, MOST_SAVED))
        self._patience = 0

    def go_on(
        self, loss: float, needed: float, hoped: float, is_new: bool, held: int
    ) -> bool:
        """Whether the next step drafts.

        Args:
            loss: of a step that drafts in vain, in steps without drafts.
            needed: accepted drafts of a request and step with which they pay.
            hoped: accepted drafts before any is seen, which count as one request's.
            is_new: whether a request has just begun.
            held: for how many steps a choice holds.
        """
        self._allowance += FIRST_BUDGET * held
        if self._patience and self.seen:
            if self._accepted and self._accepted + hoped > needed * (self.seen + 1):
                return True
            self._patience = 0
        self._patience = max(self._patience - held, 0)
        return not self._patience and self._begin(SWITCH_COST + loss * held, is_new)

    def _begin(self, cost: float, is_new: bool) -> bool:
        if is_new and self._saved >= cost:
            self._saved -= cost
        elif self._allowance >= cost:
            self._allowance -= cost
        else:
            return False
        self._patience, self.seen, self._accepted = PATIENCE, 0, 0
        return True
