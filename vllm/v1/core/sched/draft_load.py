# SPDX-License-Identifier: Apache-2.0
"""How much the scheduler lets draft, where the engine chooses it."""

from typing import TYPE_CHECKING

from vllm.config.drafter.length import chosen_lengths, is_auto
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load
from vllm.v1.spec_decode.opt_out import refuses_drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.step_metrics import StepDrafting


class ChosenLengths:
    """Stands where the scheduler has a lookup from batch size to draft length."""

    def __init__(self, scheduler: "Scheduler", lengths: DraftLengths):
        self._scheduler, self.lengths = scheduler, lengths
        self.observe = lengths.observe
        spec = scheduler.vllm_config.speculative_config
        self._limit = spec.drafter.limit(scheduler.max_model_len)

    @classmethod
    def of(cls, scheduler: "Scheduler") -> "ChosenLengths | None":
        """None where the draft length is the user's."""
        spec = scheduler.vllm_config.speculative_config
        if not is_auto(spec):
            return None
        depth = spec.drafter.num_speculative_tokens
        nodes = [length for length in chosen_lengths(spec) if length > depth]
        return cls(scheduler, DraftLengths(depth, spec.pass_times or {}, nodes))

    def __getitem__(self, batch_size: int) -> int:
        """Drafts per request for a step; to be asked once per step."""
        return self.lengths.choose(self.load(batch_size))

    def tell(self, step: "StepDrafting | None") -> None:
        """Adds to a step's stats what the choice is expected to come to."""
        if step is not None and (choice := self.lengths.choice) is not None:
            step.expected = choice.tokens, choice.seconds

    def load(self, batch_size: int) -> Load:
        """Of the requests that run, which the next step mostly has too.

        Args:
            batch_size: requests of the step at hand.
        """
        running = len(self._scheduler.running)
        if not running:
            return Load(batch_size, batch_size, 0.0)
        drafting = context = 0
        for request in self._scheduler.running:
            known = request.num_tokens + request.num_output_placeholders
            context += known
            if known < self._limit and not refuses_drafts(request.sampling_params):
                drafting += 1
        num_drafting = -(-drafting * batch_size // running)
        return Load(batch_size, num_drafting, context / running)
