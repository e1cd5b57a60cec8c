# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/core/sched/scheduler.py`.

Why: a drafter may have a shorter context than its target. Past it there are no
    drafts, yet the base goes on scheduling their verification.
How: drafts at or past the drafter's limit are taken off before scheduling.
Upstream: "[Spec Decode] Stop drafting at the draft model's context length".
Until: upstream stops offering them.
"""

from vllm._upstream import stand_on
from vllm.config.drafting import draft_limit, is_unified_method

upstream = stand_on(__name__)


class Scheduler(upstream.Scheduler):
    """Schedules no draft that its drafter cannot have made."""

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


upstream.Scheduler = Scheduler
