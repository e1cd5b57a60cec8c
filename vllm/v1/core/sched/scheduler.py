# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/core/sched/scheduler.py`.

Why: past a drafter's context there are no drafts, yet the base schedules them. Where a
    grammar takes drawn drafts off, output is biased. Draft lengths are fixed before,
    and stats do not tell of them.
How: `draft_drops.py` and `misfits.py` mend what is verified. For "auto" an object takes
    the place of the base's lookup and is told what was accepted. Stats tell of drafts.
Upstream: "[Spec Decode] Stop drafting at the draft model's context length", "… Choose
    the draft length by measured pass times", "… Metrics: draft time and length", "…
    Verify the first draft a grammar takes off".
Until: upstream does all four.
"""

from vllm._upstream import stand_on
from vllm.v1.core.sched import draft_drops, misfits
from vllm.v1.spec_decode.dynamic.draft_length import auto_lengths
from vllm.v1.spec_decode.step_metrics import step_drafting

upstream = stand_on(__name__)


class Scheduler(upstream.Scheduler):
    """Schedules no draft that its drafter cannot have made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.step_drafting = None  # of a step that is not in any stats yet
        self.draft_lengths = auto_lengths(self.vllm_config.speculative_config)
        if self.draft_lengths is not None:
            self.dynamic_sd_lookup = self.draft_lengths

    def schedule(self, *args, **kwargs):
        draft_drops.drop_drafts_past_limit(self)
        return super().schedule(*args, **kwargs)

    def update_draft_token_ids(self, draft_token_ids):
        super().update_draft_token_ids(draft_token_ids)
        misfits.keep_first_misfits(self, draft_token_ids)

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
