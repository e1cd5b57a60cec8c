# SPDX-License-Identifier: Apache-2.0
"""Which speculator drafts: the unified one, or one of vLLM's own, and why."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils.interpreting import COMPILED

from .drafter import METHODS, DrafterConfig
from .length import AUTO

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

V1 = "Model Runner V1"


def why_unsupported(spec: "SpeculativeConfig") -> str | None:
    """What in a speculative config, resolved or not, the unified speculator does not
    support; None if it supports all of it."""
    drafter = getattr(spec, "drafter", None)
    return find_unsupported(spec) if drafter is None else drafter.unsupported


def find_unsupported(spec: "SpeculativeConfig") -> str | None:
    """What in a speculative config, or in its target's config, the unified speculator
    does not support; None if it supports all of it."""
    if spec.method not in METHODS:
        return f"method {spec.method}"
    if getattr(spec, "draft_model_config", None) is None:
        return "a drafter without a model config"
    parallel = spec.target_parallel_config
    if spec.enable_adaptive_verification:
        schedule = spec.num_speculative_tokens_per_batch_size
        beside = "enable_adaptive_verification beside"
        if schedule is not None and schedule != AUTO:
            return f"{beside} a schedule of draft lengths"
        if parallel is not None and parallel.data_parallel_size > 1:
            return f"{beside} data parallelism"
    if dims := _other_rope_dims(spec):
        return f"M-RoPE of {dims[0]} dimensions on a target of {dims[1]}"
    if parallel is not None and parallel.decode_context_parallel_size > 1:
        return "decode context parallelism"
    if parallel is not None and parallel.prefill_context_parallel_size > 1:
        return "prefill context parallelism"
    return None


def _other_rope_dims(spec: "SpeculativeConfig") -> tuple[int, int] | None:
    """Dimensions of a head's M-RoPE positions and of its target's, if they differ.

    All drafters but EAGLE-3 heads, and all drafters of a target without M-RoPE, are fed
    plain positions.
    """
    target, draft = spec.target_model_config, spec.draft_model_config
    if spec.method != "eagle3" or target is None or not target.uses_mrope:
        return None
    dims = draft.mrope_num_dims, target.mrope_num_dims
    return dims if draft.uses_mrope and dims[0] != dims[1] else None


def lacks_vocabulary_mapping(vllm_config: "VllmConfig") -> bool:
    """Whether only Runner V1 can map the drafter's vocabulary to the target's."""
    spec = vllm_config.speculative_config
    if not getattr(spec, "use_heterogeneous_vocab", False):
        return False
    has_watermark = getattr(vllm_config, "watermark_config", None) is not None
    return has_watermark or why_unsupported(spec) is not None


def runs_v2_on_cpu(vllm_config: "VllmConfig", by_default: bool = True) -> bool:
    """Whether a CPU without Triton runs Model Runner V2, its kernels compiled for it.

    Args:
        by_default: the user did not ask for V2. It then runs only if the unified
            speculator drafts.
    """
    if not COMPILED or getattr(vllm_config, "watermark_config", None) is not None:
        return False
    spec = getattr(vllm_config, "speculative_config", None)
    return not by_default or (spec is not None and why_unsupported(spec) is None)


def keeps_token_budget(vllm_config: "VllmConfig") -> bool:
    """Whether the target keeps its whole token budget, which is set here: the unified
    speculator has its own buffers."""
    drafter = getattr(vllm_config.speculative_config, "drafter", None)
    if drafter is None or not drafter.is_unified:
        return False
    scheduler = vllm_config.scheduler_config
    if scheduler.max_num_scheduled_tokens is None:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
    return True


def check_needs_unified(spec: "SpeculativeConfig", drafter: DrafterConfig) -> None:
    """Checks settings that only the unified speculator supports.

    Raises:
        ValueError: one of them is set, and another speculator would draft.
    """
    setting = next(_unified_settings(spec), None)
    if drafter.is_unified or setting is None:
        return
    raise ValueError(
        f"{setting} does not support {drafter.unsupported or V1}: turn that off, or "
        f"unset {setting.partition('=')[0]}."
    )


def check_others_choose(
    vllm_config: "VllmConfig", drafter: DrafterConfig, schedule: Any, is_trimmed: bool
) -> None:
    """Checks "auto" if one of vLLM's own speculators drafts.

    Args:
        schedule: of draft lengths.
        is_trimmed: whether adaptive verification is on.

    Raises:
        ValueError: its steps are not timed, or adaptive verification also chooses.
    """
    found = None
    if drafter.is_unified or schedule != AUTO:
        return
    if not vllm_config.use_v2_model_runner:
        found = (drafter.method in METHODS and drafter.unsupported) or V1
    elif is_trimmed:
        found = "enable_adaptive_verification"
    if found is not None:
        raise ValueError(
            f'num_speculative_tokens_per_batch_size="{AUTO}" does not support {found}: '
            "turn that off, or unset num_speculative_tokens_per_batch_size."
        )


def _unified_settings(spec: "SpeculativeConfig") -> Iterator[str]:
    if spec.parallel_drafting_width is not None:
        yield "parallel_drafting_width"
    if spec.draft_tree is not None:
        yield "draft_tree"
    if spec.use_heterogeneous_vocab and spec.draft_sample_method != "greedy":
        drawn = f"draft_sample_method={spec.draft_sample_method}"
        yield f"{drawn} with use_heterogeneous_vocab"
    if spec.draft_window is not None:
        yield "draft_window"
    is_head = spec.method in ("eagle", "eagle3", "mtp")  # vLLM's also quantize
    if spec.draft_lm_head_quantization is not None and not is_head:
        yield "draft_lm_head_quantization"


def check_parallelism(vllm_config: "VllmConfig", is_unified: bool) -> None:
    """Checks that there are no pipeline stages where drafting does not support them.

    On a CPU neither of vLLM's runners drafts with several stages. Only the last stage
    knows the draft tree, and vLLM's own speculators would split a draft model into
    stages as the target is.

    Raises:
        ValueError: there are.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    if stages == 1:
        return
    if spec.draft_tree is not None:
        raise ValueError(
            f"pipeline_parallel_size ({stages}) does not support draft_tree "
            f"({spec.draft_tree}): unset it, or use tensor_parallel_size."
        )
    if not is_unified and (spec.method == "draft_model" or spec.parallel_drafting):
        raise ValueError(
            f"pipeline_parallel_size ({stages}) does not support draft models and "
            "parallel drafting where vLLM's own speculators draft: use "
            "tensor_parallel_size, or an EAGLE-3 head with parallel_drafting=false."
        )
    if current_platform.is_cpu():
        raise ValueError(
            f"Pipeline stages on a CPU ({stages}) do not support drafters: use "
            "tensor_parallel_size."
        )


def settle_ranks(spec: "SpeculativeConfig", is_unified: bool) -> None:
    """Splits a drafter over the ranks if each of them cannot have the whole of it.

    Raises:
        ValueError: it cannot be split as the target is.
    """
    target, draft = spec.target_parallel_config, spec.draft_parallel_config
    size = target.tensor_parallel_size
    if draft is None or draft.tensor_parallel_size == size:
        return
    if spec.method != "draft_model":
        split = "heads, which take the target's embeddings and output layer"
    elif spec.draft_model_config.is_moe:
        split = "mixtures of experts"
    elif not is_unified:
        split = "vLLM's own speculators"
    else:
        return
    logger.warning(
        "draft_tensor_parallel_size=%d does not support %s: %s is split in %d, as the "
        "target is. Leave it unset.",
        draft.tensor_parallel_size,
        split,
        spec.model,
        size,
    )
    spec.draft_tensor_parallel_size = size
    draft = spec.create_draft_parallel_config(target, size, spec.draft_model_config)
    spec.draft_model_config.verify_with_parallel_config(draft)
    spec.draft_parallel_config = draft


def log_who_drafts(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Logs one line if vLLM's own speculator drafts although nobody asked for it."""
    asked_for_v1 = envs.VLLM_USE_V2_MODEL_RUNNER is False
    if drafter.method not in METHODS or asked_for_v1:
        return
    if vllm_config.use_v2_model_runner:
        logger.warning_once(
            "Drafting falls back to vLLM's own speculator: the unified one does not "
            "support %s. Turn that off to use it.",
            drafter.unsupported,
        )
    elif drafter.unsupported is not None:
        logger.warning_once(
            "Drafting falls back to the deprecated Runner V1: the unified speculator "
            "does not support %s. Turn that off to use it.",
            drafter.unsupported,
        )
    else:
        on_cpu = "On a CPU it needs the packages triton and llvmlite. "
        logger.warning_once(
            "Drafting falls back to Runner V1, without the unified speculator, because "
            "Model Runner V2 cannot run this engine: see the line above. %s"
            "VLLM_USE_V2_MODEL_RUNNER=1 tells what is in the way.",
            on_cpu if current_platform.is_cpu() and not COMPILED else "",
        )
