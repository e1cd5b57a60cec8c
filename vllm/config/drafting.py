# SPDX-License-Identifier: Apache-2.0
"""What a draft checkpoint says of itself, and what the unified speculator covers.

Pure Python on plain values, so that configuration can ask before anything loads.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.config.draft_families import DraftFamily, DraftFiles, find_family
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

METHODS = ("draft_model", "eagle", "eagle3")
# Where checkpoints keep the id of the token that stands for "to be drafted":
# speculators and NeMo, PARD, P-EAGLE of Amazon. The first one found counts.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class DraftCheckpoint:
    """How a checkpoint was trained to draft.

    Attributes:
        family: which drafters it is published like; None for a language model.
        mask_token_id: token of the mask slots; None if the config names none.
        num_speculative_tokens: drafts it was trained for; None if it does not say.
    """

    family: DraftFamily | None
    mask_token_id: int | None
    num_speculative_tokens: int | None

    @property
    def is_parallel(self) -> bool:
        """Whether it was trained to draft several tokens per pass."""
        return self.family is not None and self.family.is_parallel


def get_mask_token_id(config: Any) -> int | None:
    """The mask token id of a draft model's config, a mapping or an object."""
    for key in MASK_TOKEN_KEYS:
        value = _get(config, key)
        if value is not None:
            return int(value)
    return None


def _get(config: Any, key: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(key)
    return getattr(config, key, None)


def read_checkpoint(
    config: Mapping[str, Any],
    tensor_names: Callable[[], Collection[str]] = list,
    file_names: Collection[str] = (),
) -> DraftCheckpoint:
    """Reads a draft model's raw config, as in its config.json.

    Args:
        config: the parsed config.json.
        tensor_names: names of the checkpoint's tensors, asked for only where the
            config leaves open whether its mask token is for drafting.
        file_names: of the files beside config.json, as far as they are known.
    """
    family = find_family(DraftFiles(config, tensor_names, file_names))
    return DraftCheckpoint(family, get_mask_token_id(config), _trained_depth(config))


def _trained_depth(config: Mapping[str, Any]) -> int | None:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens") or config.get("num_depths")
    return None if depth is None else int(depth)


def draft_limit(spec: Any, target_limit: int) -> int:
    """First position that a drafter cannot draft; the target's where it has none.

    A draft model has its own context. EAGLE heads share the target's positions,
    whatever their config says, and end earlier only where the user says so.
    """
    if spec.method == "draft_model":
        return spec.draft_model_config.max_model_len
    return spec.max_model_len or target_limit


def is_unified_method(vllm_config: "VllmConfig") -> bool:
    """Whether the config drafts by one of the methods of the unified speculator."""
    spec = vllm_config.speculative_config
    return spec is not None and spec.method in METHODS


def why_not_unified(vllm_config: "VllmConfig") -> str | None:
    """Why the unified speculator leaves a config to upstream's; None if it does not.

    Only for the methods in METHODS; all others are upstream's in any case.
    """
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    draft = spec.draft_model_config
    if draft is None:
        return "a drafter without a model config"
    reasons = {
        "use_heterogeneous_vocab": spec.use_heterogeneous_vocab,
        "enable_adaptive_verification": spec.enable_adaptive_verification,
        "watermarking": getattr(vllm_config, "watermark_config", None) is not None,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "a draft model with M-RoPE": draft.uses_mrope,
        "EAGLE on a multimodal target": spec.use_eagle()
        and vllm_config.model_config is not None
        and vllm_config.model_config.supports_multimodal_inputs,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def keep_token_budget(scheduler_config: Any) -> None:
    """Sets the whole budget, or the base takes slots off it and warns of that."""
    if scheduler_config.max_num_scheduled_tokens is None:
        whole = scheduler_config.max_num_batched_tokens
        scheduler_config.max_num_scheduled_tokens = whole


def _asked_for_v1() -> bool:
    return envs.VLLM_USE_V2_MODEL_RUNNER is False


def refuse_uncovered(vllm_config: "VllmConfig") -> None:
    """Refuses parallel drafting that would end on Runner V1 without a word of why.

    Raises:
        ValueError: only Runner V1 could run the config, and nobody asked for it.
    """
    spec = vllm_config.speculative_config
    if spec.parallel_drafting_width and not vllm_config.use_v2_model_runner:
        raise ValueError(
            "parallel_drafting_width needs Model Runner V2: unset it, or run V2 (on a "
            "CPU with TRITON_INTERPRET=1)."
        )
    reason = why_not_unified(vllm_config)
    if spec.parallel_drafting and reason is not None and not _asked_for_v1():
        raise ValueError(
            f"Parallel drafting does not support {reason} on Model Runner V2: turn "
            "that off, draft with parallel_drafting=false, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0 for the deprecated Runner V1."
        )


def say_that_v1_drafts(vllm_config: "VllmConfig") -> None:
    """Warns of a drafter that ends on Runner V1 without anyone having asked for it."""
    if not _asked_for_v1() and not vllm_config.use_v2_model_runner:
        logger.warning_once(
            "Drafting falls back to Runner V1, without the unified speculator, because "
            "Model Runner V2 cannot run this engine: see the line above. On a CPU set "
            "TRITON_INTERPRET=1; VLLM_USE_V2_MODEL_RUNNER=1 tells what else is in the "
            "way."
        )
