# SPDX-License-Identifier: Apache-2.0
"""Checks settings for online quantization of a drafter, while its weights load."""

from typing import TYPE_CHECKING

import torch

from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

# The value of `quantization` to recommend for a drafter's linear layers.
EXAMPLE = "fp8_per_channel"


def is_quantized_in_files(draft: "ModelConfig") -> bool:
    """Whether a checkpoint holds quantized weights; false for online quantization."""
    return draft.quantization is not None and not _is_online(draft)


def _is_online(draft: "ModelConfig") -> bool:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    names = (*ONLINE_QUANT_SHORTHAND_NAMES, "fp8")  # "fp8" is deprecated
    has_own = draft.model_arch_config.quantization_config is not None
    return draft.quantization in names and not has_own


def check_quantization(vllm_config: "VllmConfig") -> None:
    """Checks the settings that quantize a drafter while it loads.

    Raises:
        ValueError: they are not supported, or would quantize nothing.
    """
    spec = vllm_config.speculative_config
    draft = spec.draft_model_config
    if draft is None:
        return  # one of vLLM's own speculators drafts
    if not is_known_kv_cache_dtype(spec.kv_cache_dtype or "auto"):
        raise ValueError(
            f'kv_cache_dtype="{spec.kv_cache_dtype}" of speculative_config is not one '
            f"of {', '.join(KV_CACHE_DTYPES)}: correct it, or leave it out."
        )
    if _is_online(draft):
        _check_method(draft)
        _check_dtype(f'quantization="{draft.quantization}"', draft.dtype)
    if spec.draft_lm_head_quantization is None:
        return
    _check_dtype("draft_lm_head_quantization", draft.dtype)
    if spec.draft_lm_head_quantization == "nvfp4" and not current_platform.is_cuda():
        raise ValueError(
            'draft_lm_head_quantization="nvfp4" needs an NVIDIA GPU: use "fp8".'
        )


def may_quantize_lm_head(spec: "SpeculativeConfig") -> bool:
    """Whether `draft_lm_head_quantization` can apply to the kind of drafter."""
    if spec.drafter.unsupported is None:
        return True
    has_head = spec.method in ("eagle", "eagle3", "mtp")
    return has_head and not spec.use_gemma4_mtp()


def _check_method(draft: "ModelConfig") -> None:
    from vllm.config.quantization import resolve_quantization_config

    name = "fp8_per_tensor" if draft.quantization == "fp8" else draft.quantization
    found = resolve_quantization_config(name, None)
    # None for names that are also checkpoint formats, which cannot be checked here.
    is_of_experts = found is not None and found.linear is None and not draft.is_moe
    if name == "online" or is_of_experts:
        raise ValueError(
            f'quantization="{name}" of speculative_config quantizes nothing of '
            f'{draft.model}: write for example "{EXAMPLE}".'
        )


def _check_dtype(setting: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{setting} of speculative_config does not support {dtype}: set --dtype "
            "bfloat16, or unset it."
        )
