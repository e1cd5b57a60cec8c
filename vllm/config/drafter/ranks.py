# SPDX-License-Identifier: Apache-2.0
"""Whether a drafter is split over the tensor-parallel ranks, as the target is."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)


def settle_ranks(spec: "SpeculativeConfig", is_unified: bool) -> None:
    """Splits a drafter over the ranks if each of them cannot have the whole of it.

    Raises:
        ValueError: it cannot be split as the target is.
    """
    target, own = spec.target_parallel_config, spec.draft_parallel_config
    if own is None or own.tensor_parallel_size == target.tensor_parallel_size:
        return
    size, split = target.tensor_parallel_size, _what_is_split(spec, is_unified)
    if split is None:
        return
    logger.warning(
        "draft_tensor_parallel_size=%d does not support %s: %s is split in %d, as the "
        "target is. Leave it unset.",
        own.tensor_parallel_size,
        split,
        spec.model,
        size,
    )
    spec.draft_tensor_parallel_size = size
    own = spec.create_draft_parallel_config(target, size, spec.draft_model_config)
    spec.draft_model_config.verify_with_parallel_config(own)
    spec.draft_parallel_config = own


def _what_is_split(spec: "SpeculativeConfig", is_unified: bool) -> str | None:
    """The kind of drafter that is split whatever is set; None if this one is not."""
    if spec.method != "draft_model":
        return "heads, which take the target's embeddings and output layer"
    if spec.draft_model_config.is_moe:
        return "mixtures of experts"
    return None if is_unified else "vLLM's own speculators"
