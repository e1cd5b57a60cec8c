# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/core/sched/scheduler.py`.

Why: a drafter may have a shorter context than its target. Past it there are no
    drafts, yet the base goes on scheduling their verification. And the base's draft
    length is the same for good, or the user's by batch size.
How: drafts at or past the drafter's limit are taken off before scheduling. For "auto",
    a live object takes the place of the base's lookup, and is told what was accepted.
Upstream: "[Spec Decode] Stop drafting at the draft model's context length", and
    "[Spec Decode] Choose the draft length by measured pass times".
Until: upstream stops offering them, and takes "auto".
"""

from vllm._upstream import stand_on
from vllm.config.draft_length import is_auto
from vllm.config.drafting import draft_limit, is_unified_method
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths

upstream = stand_on(__name__)


class Scheduler(upstream.Scheduler):
    """Schedules no draft that its drafter cannot have made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        spec = self.vllm_config.speculative_config
        self.draft_lengths: DraftLengths | None = None
        if is_auto(spec):
            times = getattr(spec, "pass_times", {})
            self.draft_lengths = DraftLengths(self.num_spec_tokens, times)
            self.dynamic_sd_lookup = self.draft_lengths

    def schedule(self, *args, **kwargs):
        if is_unified_method(self.vllm_config):
            spec = self.vllm_config.speculative_config
            limit = draft_limit(spec, self.max_model_len)
            if limit < self.max_model_len:
                self._drop_drafts_from(limit)
        return super().schedule(*args, **kwargs)

    def _drop_drafts_from(self, limit: int) -> None:
        for request in self.running:
            known = request.num_tokens + request.num_output_placeholders
            room = max(0, limit - known)
            if len(request.spec_token_ids) > room:
                request.spec_token_ids = request.spec_token_ids[:room]

    def make_spec_decoding_stats(self, *args, **counts):
        """Called by the base for every request whose drafts were verified."""
        if self.draft_lengths is not None:
            drafted, accepted = "num_draft_tokens", "num_accepted_tokens"
            self.draft_lengths.observe(counts[drafted], counts[accepted])
        return super().make_spec_decoding_stats(*args, **counts)


upstream.Scheduler = Scheduler
