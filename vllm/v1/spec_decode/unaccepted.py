# SPDX-License-Identifier: Apache-2.0
"""Warns once if no draft is ever accepted."""

from typing import TYPE_CHECKING

from vllm.config.drafter import METHODS
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

logger = init_logger(__name__)

# Consecutive rejected drafts, one per request and step, before the warning. With a
# first token that is right once in fifty times, this happens by chance once in four
# hundred.
MAX_DRAFTS = 300


class UnacceptedDrafts:
    """Counts drafts since the last one of which anything was accepted.

    Args:
        model: the drafter's name.
    """

    def __init__(self, model: str):
        self.model = model
        self.num_drafts = self.num_tokens = 0

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "UnacceptedDrafts | None":
        """The counter of an engine; None if its drafter cannot be a wrong one."""
        spec = scheduler.vllm_config.speculative_config
        if spec is None or spec.method not in METHODS:
            return None
        if spec.rejection_sample_method == "synthetic":
            return None
        return cls(spec.model)

    def observe(self, num_tokens: int, num_accepted: int) -> bool:
        """Records the verified draft of one request.

        Args:
            num_accepted: by the target, whether or not the request received them.

        Returns:
            Whether to go on counting: False after the warning.
        """
        if num_accepted:
            self.num_drafts = self.num_tokens = 0
        else:
            self.num_drafts += 1
            self.num_tokens += num_tokens
        if self.num_drafts < MAX_DRAFTS:
            return True
        logger.warning(
            "Nothing of the last %d drafts, %d tokens, was accepted: %s drafts in "
            "vain, and each step waits for it. Check that it was trained for this very "
            "target, with its tokenizer and from these weights, and that the line "
            '"Drafter …" at start-up is what its authors say; or leave '
            "speculative_config unset.",
            self.num_drafts,
            self.num_tokens,
            self.model,
        )
        return False
