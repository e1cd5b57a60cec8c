# SPDX-License-Identifier: Apache-2.0
"""Which speculator drafts, the unified one or one of vLLM's own, and what an engine
supports with it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils.interpreting import COMPILED

from .drafter import BLOCK_METHODS, METHODS, DrafterConfig, first_of
from .families import find_unsupported_module
from .length import AUTO

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

V1 = "Model Runner V1"


# Which speculator drafts.


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
    if (draft := getattr(spec, "draft_model_config", None)) is None:
        return "a drafter without a model config"
    target, parallel = spec.target_model_config, spec.target_parallel_config
    beside = "enable_adaptive_verification beside"
    is_trimmed = spec.enable_adaptive_verification
    has_schedule = spec.num_speculative_tokens_per_batch_size not in (None, AUTO)

    def has_ranks(kind: str) -> bool:
        return parallel is not None and getattr(parallel, f"{kind}_parallel_size") > 1

    # Only EAGLE-3 heads are fed M-RoPE positions, and only if the target has them.
    has_both = target is not None and target.uses_mrope and draft.uses_mrope
    dims = (draft.mrope_num_dims, target.mrope_num_dims) if has_both else (0, 0)
    reasons = {
        f"{beside} a schedule of draft lengths": is_trimmed and has_schedule,
        f"{beside} data parallelism": is_trimmed and has_ranks("data"),
        f"M-RoPE of {dims[0]} dimensions on a target of {dims[1]}": (
            spec.method == "eagle3" and dims[0] != dims[1]
        ),
        "decode context parallelism": has_ranks("decode_context"),
        "prefill context parallelism": has_ranks("prefill_context"),
    }
    found = first_of(reasons)
    return found if found or spec.method != "mtp" else find_unsupported_module(spec)


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
            speculator drafts, or vLLM's own of the DFlash family.
    """
    if not COMPILED or getattr(vllm_config, "watermark_config", None) is not None:
        return False
    spec = getattr(vllm_config, "speculative_config", None)
    if not by_default or spec is None:
        return not by_default
    return spec.method in BLOCK_METHODS or why_unsupported(spec) is None


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


def may_quantize_lm_head(spec: "SpeculativeConfig") -> bool:
    """Whether `draft_lm_head_quantization` can apply to the kind of drafter."""
    if why_unsupported(spec) is None:
        return True
    return spec.method in ("eagle", "eagle3", "mtp") and not spec.use_gemma4_mtp()


def check_speculator(
    vllm_config: "VllmConfig", drafter: DrafterConfig, schedule: Any, is_trimmed: bool
) -> None:
    """Refuses settings that only the unified speculator supports if another one drafts,
    and "auto" if that one's steps are not timed, or adaptive verification also chooses.

    Args:
        schedule: of draft lengths.
        is_trimmed: whether adaptive verification is on.
    """
    if drafter.is_unified:
        return
    found, spec = drafter.unsupported or V1, vllm_config.speculative_config
    if drafter.method in BLOCK_METHODS and not drafter.is_block:
        found = V1
    setting = next(_unified_settings(spec, drafter), None)
    if setting is None and schedule == AUTO:
        setting = f'num_speculative_tokens_per_batch_size="{AUTO}"'
        if vllm_config.use_v2_model_runner:
            found = "enable_adaptive_verification" if is_trimmed else ""
        elif drafter.method not in METHODS:
            found = V1
    if setting and found:
        raise ValueError(
            f"{setting} does not support {found}: turn that off, or unset "
            f"{setting.partition('=')[0]}."
        )


def _unified_settings(
    spec: "SpeculativeConfig", drafter: DrafterConfig
) -> Iterator[str]:
    keys = "parallel_drafting_width", "draft_tree", "draft_window"
    for key in keys:
        has_trees = key == "draft_tree" and drafter.can_draft_trees
        if getattr(spec, key) is not None and not has_trees:
            yield key
    if spec.use_heterogeneous_vocab and spec.draft_sample_method != "greedy":
        drawn = f"draft_sample_method={spec.draft_sample_method}"
        yield f"{drawn} with use_heterogeneous_vocab"
    is_head = spec.method in ("eagle", "eagle3", "mtp")  # vLLM's also quantize
    if spec.draft_lm_head_quantization is not None and not is_head:
        yield "draft_lm_head_quantization"


def log_who_drafts(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Logs one line if vLLM's own speculator drafts although nobody asked for it."""
    asked_for_v1 = envs.VLLM_USE_V2_MODEL_RUNNER is False
    if drafter.is_unified or drafter.method not in METHODS or asked_for_v1:
        return
    if drafter.unsupported is None and not vllm_config.use_v2_model_runner:
        on_cpu = "On a CPU it needs the packages triton and llvmlite. "
        logger.warning_once(
            "Drafting falls back to Runner V1, without the unified speculator, because "
            "Model Runner V2 cannot run this engine: see the line above. %s"
            "VLLM_USE_V2_MODEL_RUNNER=1 tells what is in the way.",
            on_cpu if current_platform.is_cpu() and not COMPILED else "",
        )
        return
    is_v2 = vllm_config.use_v2_model_runner
    logger.warning_once(
        "Drafting falls back to %s: the unified one does not support %s.%s",
        f"vLLM's own speculator{'' if is_v2 else ' on the deprecated Runner V1'}",
        drafter.unsupported,
        "" if "MTP modules" in drafter.unsupported else " Turn that off to use it.",
    )


# What the engine and the target support.


def check_parallelism(vllm_config: "VllmConfig", is_fitted: bool) -> None:
    """Refuses pipeline stages where drafting does not support them.

    On a CPU neither of vLLM's runners drafts with several stages. Only the last stage
    knows the draft tree, and vLLM's own speculators would split a draft model into
    stages as the target is.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    stages = parallel.pipeline_parallel_size
    named = f"pipeline_parallel_size ({stages}) does not support"
    if stages == 1:
        return
    if spec.draft_tree is not None:
        raise ValueError(
            f"{named} draft_tree ({spec.draft_tree}): unset it, or use "
            "tensor_parallel_size."
        )
    if not is_fitted and (spec.method == "draft_model" or spec.parallel_drafting):
        raise ValueError(
            f"{named} draft models and parallel drafting where vLLM's own speculators "
            "draft: use tensor_parallel_size, or an EAGLE-3 head with "
            "parallel_drafting=false."
        )
    if current_platform.is_cpu():
        raise ValueError(
            f"Pipeline stages on a CPU ({stages}) do not support drafters: use "
            "tensor_parallel_size."
        )


def check_layers(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Refuses heads fed hidden states that the target does not return, or that Model
    Runner V1 orders otherwise."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    spec, ids = vllm_config.speculative_config, list(drafter.tapped_layers or ())
    if ids != sorted(ids) and not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {ids} are not in "
            "ascending order, in which Model Runner V1 feeds them: turn V1 off."
        )
    if spec.method != "eagle3" or drafter.tapped_layers == ():
        return
    target = get_model_cls(spec.target_model_config)
    if not supports_eagle3(target):
        raise ValueError(
            f"EAGLE-3 does not support {target.__name__} as a target, which in vLLM "
            f"does not return auxiliary hidden states: use a draft model or PARD "
            f"in the place of {spec.model}."
        )


def check_blocks(vllm_config: "VllmConfig") -> None:
    """Refuses, on a CPU, target and drafter of which only one has MLA.

    There vLLM's MLA supports only KV blocks of 16 tokens, and its other attention only
    multiples of 32. With AMX it has another MLA, which supports those.
    """
    spec = vllm_config.speculative_config
    target, draft = spec.target_model_config, spec.draft_model_config
    if not current_platform.is_cpu() or target.use_mla == draft.use_mla:
        return
    backend = vllm_config.attention_config.backend
    is_asked_for = backend is not None and backend.name == "CPU_MLA"
    if torch.cpu._is_amx_tile_supported() and not is_asked_for:
        return
    has, lacks = (target.model, spec.model)[:: 1 if target.use_mla else -1]
    raise ValueError(
        f"{has} has MLA and {lacks} has not, which on a CPU need KV blocks of "
        "different sizes: set VLLM_MLA_DISABLE=1, or use a drafter with the target's "
        "attention."
    )


def settle_ranks(spec: "SpeculativeConfig", is_unified: bool) -> None:
    """Splits a drafter over the ranks, as the target is, if each of them cannot have
    the whole of it; refuses one that cannot be split so."""
    target, draft = spec.target_parallel_config, spec.draft_parallel_config
    size = target.tensor_parallel_size
    if draft is None or draft.tensor_parallel_size == size:
        return
    reasons = {
        "heads, which take the target's embeddings and output layer": (
            spec.method != "draft_model"
        ),
        "mixtures of experts": spec.draft_model_config.is_moe,
        "vLLM's own speculators": not is_unified,
    }
    split = first_of(reasons)
    if split is None:
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
