# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/config/speculative.py`.

Why: whether a checkpoint drafts in parallel, and how far, stands in its files; the
    base asks the user. Its drafting slots are taken off the target's token budget.
    Which draft length fits which load, the user has to find out.
How: `parallel_drafting` and `num_speculative_tokens` left unset come from the
    checkpoint, and what contradicts it is refused; `parallel_drafting_width` is new;
    a drafter that owns its buffers takes no slots off the target; the schedule of
    draft lengths may be "auto".
Upstream: "[Spec Decode] Take parallel drafting and its length from the checkpoint".
Until: upstream detects parallel drafters itself.
"""

from pydantic import Field

from vllm._upstream import stand_on
from vllm.config.draft_defaults import fill_from_checkpoint, verify_drafting
from vllm.config.draft_length import DraftLengthSchedule, verify_draft_length
from vllm.config.utils import config

upstream = stand_on(__name__)


@config
class SpeculativeConfig(upstream.SpeculativeConfig):
    """Configuration for speculative decoding."""

    parallel_drafting: bool | None = None
    """Draft several tokens per pass (PARD, P-EAGLE) instead of one after the other.
    Left unset, the checkpoint decides."""
    parallel_drafting_width: int | None = Field(default=None, ge=1)
    """Tokens drafted per pass with parallel drafting, at most
    `num_speculative_tokens`, which is the default. Fewer make several passes."""
    num_speculative_tokens_per_batch_size: DraftLengthSchedule = None
    """How many tokens to draft: `[first batch size, last batch size, draft length]`
    for each range, or "auto", which goes by step times and acceptance so far."""

    def __post_init__(self):
        fill_from_checkpoint(self)
        super().__post_init__()
        verify_drafting(self)
        verify_draft_length(self)

    @property
    def drafting_width(self) -> int:
        """Tokens drafted per pass: 1 for autoregressive drafting."""
        if not self.parallel_drafting:
            return 1
        return self.parallel_drafting_width or self.num_speculative_tokens

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        if getattr(self, "drafter_owns_buffers", False):
            return 0
        return super().max_num_new_slots_for_drafting


upstream.SpeculativeConfig = SpeculativeConfig
