# SPDX-License-Identifier: Apache-2.0
"""vLLM's estimator of acceptance (pull request #52228), fitted sooner at first."""

from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)

FIRST_REFIT = 2  # steps; each refit doubles them


class QuickEstimator(OnlineAcceptanceEstimator):
    """Refits after 2 steps, 4 more, 8 more, until it does so as often as vLLM's.

    Where few drafts of a batch are verified, what is expected of them says how many: as
    long as vLLM's first guess stands, a drafter that is less sure than right has too
    few verified. A step of a large batch has some hundred drafts to learn from.
    """

    def step(self, *args) -> None:
        often = OnlineAcceptanceEstimator.REFIT_INTERVAL
        self.REFIT_INTERVAL = min(FIRST_REFIT << min(self._refits, 16), often)
        super().step(*args)
