# SPDX-License-Identifier: Apache-2.0
"""Whether drafts are verified in part where nobody said so."""

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.platforms import current_platform

from . import length

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)


def settle_trimming(vllm_config: "VllmConfig") -> None:
    """Settles it as a part of the default that chooses how much to draft.

    Where something of the engine is in the way, all drafts are verified, and one line
    says what. What only workers know of their attention they find later: `verify_all`.
    """
    spec = vllm_config.speculative_config
    if spec is None or spec.enable_adaptive_verification is not None:
        return
    spec.enable_adaptive_verification = False
    if not length.TRIMS_BY_DEFAULT or not _is_by_default(spec):
        return
    spec.enable_adaptive_verification = spec.is_trimmed_by_default = True
    if (found := _why_not(vllm_config)) is not None:
        verify_all(spec, found)


def _is_by_default(spec: "SpeculativeConfig") -> bool:
    """Whether the engine chooses how much the unified speculator drafts, unasked."""
    return spec.is_auto_by_default and length.is_auto(spec) and bool(spec.drafter)


def verify_all(spec: "SpeculativeConfig", why: str) -> None:
    """Has every step verify all its drafts."""
    spec.enable_adaptive_verification = spec.is_trimmed_by_default = False
    logger.info(
        "Every step verifies all its drafts: verifying only the likeliest of large "
        "batches does not support %s.",
        why,
    )


def _why_not(vllm_config: "VllmConfig") -> str | None:
    """What of an engine keeps it from trimming; None if nothing does.

    Most of it vLLM refuses beside `enable_adaptive_verification`. A CPU would have to
    compile what ranks drafts, and attention like MLA does more in every step.
    """
    spec, model = vllm_config.speculative_config, vllm_config.model_config
    parallel = vllm_config.parallel_config
    reasons = {
        "a CPU": current_platform.is_cpu(),
        "LoRA": vllm_config.lora_config is not None,
        "data parallelism": parallel.data_parallel_size > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "batch-sharded sampling": parallel.enable_batch_sharded_sampling,
        "returned sampling masks": model.return_sampling_mask,
        "returned routed experts": vllm_config.aux_output_config.enabled,
        "MLA": model.use_mla,
        "use_local_argmax_reduction": spec.use_local_argmax_reduction,
    }
    return next((what for what, is_there in reasons.items() if is_there), None)
