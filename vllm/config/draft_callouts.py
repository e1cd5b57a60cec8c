# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own config classes call, where a drafter is settled."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

from vllm.config.draft_checks import check_parallelism, check_settings
from vllm.config.draft_defaults import fill_from_checkpoint, settle_drafting
from vllm.config.draft_errors import named_errors
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

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


def settles_drafting(
    post_init: Callable[["SpeculativeConfig"], None],
) -> Callable[["SpeculativeConfig"], None]:
    """Decorates `SpeculativeConfig.__post_init__`: the checkpoint fills what is unset.

    Raises:
        ValueError: a setting, or what the checkpoint is, cannot work.
    """

    @wraps(post_init)
    def settled(self: "SpeculativeConfig") -> None:
        check_settings(self)
        fill_from_checkpoint(self)
        with named_errors(self):
            post_init(self)
        settle_drafting(self)

    return settled


def is_unified(config: "VllmConfig") -> bool:
    """Whether the unified speculator drafts, as long as Runner V2 runs the engine."""
    return is_unified_method(config) and why_not_unified(config) is None


def settle_runner(config: "VllmConfig") -> bool:
    """Says who drafts, and refuses what nobody can.

    Returns:
        Whether the drafter has buffers of its own. It takes no slots off the token
        budget then, which is set.
    """
    refuse_uncovered_auto(config)
    if not is_unified_method(config):
        return False
    check_parallelism(config)
    check_weights(config)
    refuse_uncovered(config)
    owns = is_unified(config) and config.use_v2_model_runner
    config.speculative_config.drafter_owns_buffers = owns
    feed_on_v2_only(config.speculative_config, owns)
    if owns:
        keep_token_budget(config.scheduler_config)
    else:
        say_that_v1_drafts(config)
    return owns
