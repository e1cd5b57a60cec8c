# SPDX-License-Identifier: Apache-2.0
"""Differences between the vLLM releases that this tree can be composed on.

Each is detected by feature, not by version. The patches for upstream are made for one
release and leave this module out: tools/upstream/series.toml.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def may_skip_drafts() -> bool:
    """Whether vLLM skips drafting in a step if none of its requests can use drafts.

    Since 0.33.0.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    return hasattr(SchedulerOutput, "skip_drafts")


def keep_targets_context(config_class: "type[VllmConfig]") -> None:
    """Lets the target generate past the end of the drafter's context.

    Since 0.33.0 vLLM on Runner V2 lowers `max_model_len` to the drafter's, because its
    own speculators cannot stop drafting; the unified one can. 0.32.0 has no such method
    and lowers nothing.
    """
    limit = getattr(config_class, "_limit_max_model_len_to_draft", None)
    if limit is None:
        return

    def limit_unless_unified(self: "VllmConfig") -> None:
        spec = self.speculative_config
        if spec is None or spec.drafter.unsupported is not None:
            limit(self)

    config_class._limit_max_model_len_to_draft = limit_unless_unified
