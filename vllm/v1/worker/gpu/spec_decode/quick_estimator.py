# SPDX-License-Identifier: Apache-2.0
"""vLLM's acceptance estimator (pull request #52228), fitted sooner and more stable, and
kept while an engine sleeps."""

import torch

from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)

FIRST_REFIT = 2  # reported steps; each refit doubles them
# Bounds of a refit's moves, and of the parameters, in logits: 6.0 is that of 0.9975.
LARGEST_MOVE, LARGEST_INTERCEPT, LARGEST_SLOPE = 1.5, 6.0, 3.0


class QuickEstimator(OnlineAcceptanceEstimator):
    """Refits after 2 steps, 4 more, 8 more, until it does so as often as vLLM's.

    Only steps count whose estimates are reported, see `v1/core/sched/draft_policy.py`.

    If only some drafts of a batch are verified, the estimates determine how many: with
    vLLM's initial guess too few are, if the drafter is right more often than its
    confidence says. A step of a large batch has some hundred drafts to learn from.

    A refit is one Newton step. If all drafts were accepted for a while, the curvature
    is almost zero: the first rejection then moved intercepts by hundreds of thousands.
    So moves are bounded, as in a trust region.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self._first = self.slope.item(), self.intercepts[0].item()

    def step(self, *args) -> None:
        often = OnlineAcceptanceEstimator.REFIT_INTERVAL
        self.REFIT_INTERVAL = min(FIRST_REFIT << min(self._refits, 16), often)
        if self._steps_since_refit + 1 < self.REFIT_INTERVAL:
            super().step(*args)
            return
        known = [(value, value.clone()) for value in (self.slope, self.intercepts)]
        super().step(*args)
        for value, before in known:
            move = (value - before).clamp(-LARGEST_MOVE, LARGEST_MOVE)
            torch.add(before, move, out=value)
        self.slope.clamp_(0.0, LARGEST_SLOPE)
        self.intercepts.clamp_(-LARGEST_INTERCEPT, LARGEST_INTERCEPT)

    def forget(self) -> None:
        """Resets to the initial state, in place: CUDA graphs read these tensors."""
        slope, intercept = self._first
        self.slope.fill_(slope)
        self.intercepts.fill_(intercept)
        seen = self.info, self.grad, self.counts, self.features, self.predictions
        for tensor in seen:
            tensor.zero_()
        self._refits = self._steps_since_refit = 0


def outlast_weights(owner: object) -> None:
    """Allocates memory anew for an object's tensors, which remain the same tensors.

    Sleep of level 2 discards memory that was allocated while weights were loaded; when
    the engine wakes up it has any contents. What is allocated while the KV cache is
    initialized is kept, except for the cache itself. To be called then, before CUDA
    graphs are captured.
    """
    for tensor in vars(owner).values():
        if isinstance(tensor, torch.Tensor):
            tensor.data = tensor.clone()
