# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/config/speculative.py`.

Why: how a checkpoint drafts stands in its files; the base asks, or guesses by its path.
How: what is unset comes from there; buffers of its own take no slots off the target.
Upstream: "[Spec Decode] Take method and parallel drafting from the checkpoint".
Until: upstream detects drafters by what is in their files.
"""

from pydantic import Field

from vllm._upstream import stand_on
from vllm.config.draft_checks import check_settings
from vllm.config.draft_defaults import fill_from_checkpoint, settle_drafting
from vllm.config.draft_errors import named_errors
from vllm.config.draft_families import as_the_base_reads_it
from vllm.config.draft_length import DraftLengthSchedule
from vllm.config.draft_settings import DraftSettings, hash_with_features
from vllm.config.utils import config

upstream = stand_on(__name__)
Upstream = upstream.SpeculativeConfig


@config
class SpeculativeConfig(DraftSettings, Upstream):
    """Configuration for speculative decoding."""

    parallel_drafting: bool | None = None
    """Draft several tokens per pass (PARD, P-EAGLE). Unset, the checkpoint decides."""
    parallel_drafting_width: int | None = Field(default=None, ge=1)
    """Tokens drafted per pass then; unset, `num_speculative_tokens`, the most."""
    num_speculative_tokens_per_batch_size: DraftLengthSchedule = None
    """How many tokens to draft: `[first batch size, last batch size, draft length]`
    for each range, or "auto", which goes by step times and acceptance so far."""

    def __post_init__(self):
        check_settings(self)
        fill_from_checkpoint(self)
        with named_errors(self):
            super().__post_init__()
        settle_drafting(self)

    def compute_hash(self) -> str:
        known = super().compute_hash()
        return hash_with_features(self, known)

    @staticmethod
    def hf_config_override(hf_config, **more):
        return Upstream.hf_config_override(as_the_base_reads_it(hf_config), **more)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        if getattr(self, "drafter_owns_buffers", False):
            return 0
        return super().max_num_new_slots_for_drafting


upstream.SpeculativeConfig = SpeculativeConfig
