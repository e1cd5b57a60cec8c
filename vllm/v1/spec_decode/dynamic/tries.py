# SPDX-License-Identifier: Apache-2.0
"""Steps that are served otherwise now and then, to see what they would come to."""

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
