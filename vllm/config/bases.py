# SPDX-License-Identifier: Apache-2.0
"""What differs between the releases of vLLM that this tree composes over.

Each is asked for by what a release has, not by its number. The patches for upstream are
made for one release and leave this module out: tools/upstream/series.toml.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def may_skip_drafts() -> bool:
    """Whether a step drafts nothing where none of its requests can use drafts.

    From 0.33.0 on.
    """
    from vllm.v1.core.sched.output import SchedulerOutput

    return hasattr(SchedulerOutput, "skip_drafts")


def keep_targets_context(config_class: "type[VllmConfig]") -> None:
    """Lets a target go on where the context of its drafter ends.

    From 0.33.0 on vLLM cuts `max_model_len` to the drafter's on Runner V2, whose other
    speculators cannot stop drafting; the unified one does. 0.32.0 has no such method,
    and cuts nothing.
    """
    limit = getattr(config_class, "_limit_max_model_len_to_draft", None)
    if limit is None:
        return

    def limit_unless_unified(self: "VllmConfig") -> None:
        spec = self.speculative_config
        if spec is None or spec.drafter.unsupported is not None:
            limit(self)

    config_class._limit_max_model_len_to_draft = limit_unless_unified
