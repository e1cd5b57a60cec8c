# SPDX-License-Identifier: Apache-2.0
"""What a batch has to do, as far as it decides how much to draft."""

from typing import TYPE_CHECKING

from vllm.config.drafting import draft_limit
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


class ChosenLengths:
    """Stands where the scheduler has a lookup from batch size to draft length."""

    def __init__(self, scheduler: "Scheduler", lengths: DraftLengths):
        self._scheduler, self._lengths = scheduler, lengths
        spec = scheduler.vllm_config.speculative_config
        self._limit = draft_limit(spec, scheduler.max_model_len)

    def __getitem__(self, batch_size: int) -> int:
        """Drafts per request for a step; to be asked once per step."""
        return self._lengths.choose(self.load(batch_size))

    def load(self, batch_size: int) -> Load:
        """Of the requests that run, which the next step mostly has too.

        Args:
            batch_size: requests of the step at hand.
        """
        known = [
            request.num_tokens + request.num_output_placeholders
            for request in self._scheduler.running
        ]
        if not known:
            return Load(batch_size, batch_size, 0.0)
        drafting = sum(tokens < self._limit for tokens in known)
        num_drafting = -(-drafting * batch_size // len(known))
        return Load(batch_size, num_drafting, sum(known) / len(known))
