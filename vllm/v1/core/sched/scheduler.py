# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/core/sched/scheduler.py`.

Why: a drafter may have a shorter context than its target. Past it there are no
    drafts, yet the base goes on scheduling their verification. The base's draft length
    is the same for good, or the user's by batch size, and its stats do not tell of it.
How: drafts at or past the drafter's limit are taken off before scheduling. For "auto",
    a live object takes the place of the base's lookup, and is told what was accepted.
    What a step says of its drafting is added to its stats.
Upstream: "[Spec Decode] Stop drafting at the draft model's context length", "… Choose
    the draft length by measured pass times", "… Metrics: draft time and length".
Until: upstream stops offering them, takes "auto", and counts both.
"""

from vllm._upstream import stand_on
from vllm.config.draft_length import is_auto
from vllm.v1.core.sched.draft_drops import drop_drafts_past_limit
from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths
from vllm.v1.spec_decode.step_metrics import step_drafting

upstream = stand_on(__name__)


class Scheduler(upstream.Scheduler):
    """Schedules no draft that its drafter cannot have made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        spec = self.vllm_config.speculative_config
        self.step_drafting = None  # of a step that is not in any stats yet
        self.draft_lengths: DraftLengths | None = None
        if is_auto(spec):
            times = getattr(spec, "pass_times", {})
            self.draft_lengths = DraftLengths(self.num_spec_tokens, times)
            self.dynamic_sd_lookup = self.draft_lengths

    def schedule(self, *args, **kwargs):
        drop_drafts_past_limit(self)
        return super().schedule(*args, **kwargs)

    def make_spec_decoding_stats(self, *args, **counts):
        """Called by the base for every request whose drafts were verified."""
        if self.draft_lengths is not None:
            outcome = counts["num_draft_tokens"], counts["num_accepted_tokens"]
            self.draft_lengths.observe(*outcome)
        return super().make_spec_decoding_stats(*args, **counts)

    def update_from_output(self, scheduler_output, output):
        self.step_drafting = step_drafting(self.vllm_config, scheduler_output, output)
        return super().update_from_output(scheduler_output, output)

    def make_stats(self, stats=None, *args, **kwargs):
        step, self.step_drafting = self.step_drafting, None
        if step is not None and self.log_stats:
            stats = step.added_to(stats, self.num_spec_tokens)
        return super().make_stats(stats, *args, **kwargs)


upstream.Scheduler = Scheduler
