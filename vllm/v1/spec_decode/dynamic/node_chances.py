# SPDX-License-Identifier: Apache-2.0
"""How likely a node of a draft tree is accepted, by what its drafter gave its path.

Which nodes are likelier than others a drafter tells well. How likely they are goes by
the text and by the temperature too: paths that PARD gives 0.6 are accepted in three of
four steps at temperature 0.5, and in one of two at 0.8. How many nodes are worth their
rows depends on that. So the chance is learnt while serving: a logistic function of the
log-odds of the path's probability (Platt 1999). It rises with the probability, and so
leaves the order of nodes as it is.
"""

import numpy as np

# Log-odds are counted in bins of this width, up to so many from zero.
BIN, LARGEST = 0.5, 14.0
HALF_LIFE = 64  # steps after which what was seen counts half
# Before anything is seen: what PARD and P-EAGLE come to on held-out text, on average
# over greedy and sampled. Later it counts as so much curvature.
PRIOR_INTERCEPT, PRIOR_SLOPE = 0.2, 1.15
PRIOR_WEIGHT = 4.0
LARGEST_MOVE = 0.5  # of either coefficient in a step


class NodeChances:
    """Learns from verified nodes, and tells chances of others."""

    def __init__(self) -> None:
        count = 2 * round(LARGEST / BIN) + 1
        self._odds = np.linspace(-LARGEST, LARGEST, count)
        self._seen, self._accepted = np.zeros((2, count))
        self._prior = np.array([PRIOR_INTERCEPT, PRIOR_SLOPE])
        self._line = self._prior.copy()

    def of(self, paths: np.ndarray) -> np.ndarray:
        """Chances of nodes, of any shape, whose paths have these probabilities.

        A path of probability 0 is never accepted.
        """
        return np.where(paths > 0.0, self._at(log_odds(paths)), 0.0)

    def _at(self, odds: np.ndarray) -> np.ndarray:
        intercept, slope = self._line
        return 1.0 / (1.0 + np.exp(-(intercept + slope * odds)))

    def observe(self, paths: np.ndarray, accepted: np.ndarray) -> None:
        """Takes in the verified nodes of a step, and learns of them.

        Args:
            paths: [nodes], probabilities of their paths.
            accepted: [nodes] bool.
        """
        is_possible = paths > 0.0
        places = np.rint((log_odds(paths[is_possible]) + LARGEST) / BIN).astype(int)
        keep, size = 0.5 ** (1 / HALF_LIFE), len(self._odds)
        self._seen *= keep
        self._accepted *= keep
        self._seen += np.bincount(places, minlength=size)
        self._accepted += np.bincount(places, accepted[is_possible], minlength=size)
        self._refit()

    def _refit(self) -> None:
        """One Newton step of logistic regression, towards the prior where little is
        known, and bounded."""
        chances = self._at(self._odds)
        design = np.stack([np.ones_like(self._odds), self._odds])
        missing = self._accepted - self._seen * chances
        weights = self._seen * chances * (1.0 - chances)
        gradient = design @ missing + PRIOR_WEIGHT * (self._prior - self._line)
        curvature = design * weights @ design.T + PRIOR_WEIGHT * np.eye(2)
        move = np.linalg.solve(curvature, gradient)
        self._line += move.clip(-LARGEST_MOVE, LARGEST_MOVE)
        self._line[1] = max(self._line[1], 0.0)


def log_odds(paths: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)), bounded."""
    least = 1.0 / (1.0 + np.exp(LARGEST))
    paths = paths.astype(np.float64).clip(least, 1.0 - least)
    return np.log(paths) - np.log1p(-paths)
