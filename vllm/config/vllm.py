# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/config/vllm.py`.

Why: the base sends parallel drafting to the deprecated Runner V1, takes a drafter's
    slots off the token budget, and (0.33.0) cuts the target's context to the drafter's.
How: where the unified speculator covers the config, that reason is dropped and the
    drafter is marked as having buffers of its own; what neither covers is refused.
Upstream: "[Spec Decode] Parallel drafting on Model Runner V2".
Until: upstream's Runner V2 runs parallel drafting.
"""

from vllm._upstream import stand_on
from vllm.config.bases import keep_targets_context
from vllm.config.draft_checks import check_parallelism
from vllm.config.draft_features import feed_on_v2_only
from vllm.config.draft_length import refuse_uncovered_auto
from vllm.config.draft_tensors import check_weights
from vllm.config.drafting import (
    is_unified_method,
    keep_token_budget,
    refuse_uncovered,
    say_that_v1_drafts,
    why_not_unified,
)

upstream = stand_on(__name__)
VllmConfig = upstream.VllmConfig

UNSUPPORTED = "parallel drafting for EAGLE speculative decoding"
_unsupported_features = VllmConfig._get_v2_model_runner_unsupported_features
_set_max_num_scheduled_tokens = VllmConfig._set_max_num_scheduled_tokens


def _without_parallel_drafting(self: VllmConfig) -> list[str]:
    features = _unsupported_features(self)
    if is_unified_method(self) and why_not_unified(self) is None:
        return [feature for feature in features if feature != UNSUPPORTED]
    return features


def _mark_drafter(self: VllmConfig) -> None:
    refuse_uncovered_auto(self)
    if is_unified_method(self):
        check_parallelism(self)
        check_weights(self)
        refuse_uncovered(self)
        owns = why_not_unified(self) is None and self.use_v2_model_runner
        self.speculative_config.drafter_owns_buffers = owns
        feed_on_v2_only(self.speculative_config, owns)
        if owns:
            return keep_token_budget(self.scheduler_config)
        say_that_v1_drafts(self)
    _set_max_num_scheduled_tokens(self)


VllmConfig._get_v2_model_runner_unsupported_features = _without_parallel_drafting
VllmConfig._set_max_num_scheduled_tokens = _mark_drafter
keep_targets_context(VllmConfig)
