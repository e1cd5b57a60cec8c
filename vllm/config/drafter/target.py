# SPDX-License-Identifier: Apache-2.0
"""Checks a drafter's config against the target's, and finds what it is fed of it.

PARD-2 is a language model that drafts like PARD. Its file `warp_model.bin` holds a
projection of some of the target's hidden states, which are added to the embeddings.
Without them it can draft, too, but less well.
"""

import re
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.cache import KV_CACHE_DTYPES, is_known_kv_cache_dtype
from vllm.logger import init_logger
from vllm.platforms import current_platform

from .drafter import DrafterConfig, TargetFeatures
from .families import (
    AGAIN,
    check_finite,
    check_integers,
    get_mask_token_id,
    takes_aux_hidden_states,
    tapped_layers,
)
from .files import find_file, tensor_names
from .support import why_unsupported

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

ONE_LAYER = "EAGLE-3, SafeAILab"  # a family whose heads have a single layer
WARP = "warp_model.bin"
WEIGHT, BIAS = "target_proj.weight", "target_proj.bias"
# Names of config keys in some other checkpoints.
OLD_NAMES = {
    "pard2_scale": ("feat_scale", "pard_scale"),
    "pard2_target_dim": ("pard_target_dim",),
    "pard2_target_layers": ("target_layers",),
    "pard2_proj_bias": ("proj_bias",),
    "pard2_ml": ("ml",),
}
# Why a PARD-2 drafter is not fed the target's hidden states, and what to do about it.
NOT_UNIFIED = (
    "the unified speculator does not run. Run Model Runner V2, and leave off what "
    "keeps drafting from it"
)
LAST_STAGE = (
    "the last pipeline stage, which drafts, lacks those of other stages. Use "
    "tensor_parallel_size"
)
MANY_LAYERS = [-1, -8, -16, -24]
# The value of `quantization` to recommend for a drafter's linear layers.
EXAMPLE = "fp8_per_channel"


def find_context(spec: "SpeculativeConfig") -> int | None:
    """Number of positions that a drafter can draft at; None: all of the target's.

    A draft model has its own context. EAGLE heads share the target's positions,
    whatever their config says, and have fewer only if the user sets `max_model_len`.

    Raises:
        ValueError: no draft would ever fit.
    """
    drafts, target = spec.num_speculative_tokens, spec.target_model_config.max_model_len
    if drafts >= target:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the target's "
            f"max_model_len ({target}): lower it, for example to 7."
        )
    if spec.draft_tree is not None and spec.draft_tree >= target:
        raise ValueError(
            f"draft_tree ({spec.draft_tree}) must be below the target's max_model_len "
            f"({target}): lower it."
        )
    context = spec.max_model_len
    if spec.method == "draft_model":
        context = spec.draft_model_config.max_model_len
    if context is not None and drafts >= context:
        raise ValueError(
            f"num_speculative_tokens ({drafts}) must be below the drafter's context "
            f"({context}): lower it, or raise max_model_len of speculative_config or "
            "max_position_embeddings of the drafter."
        )
    return context if context is not None and context < target else None


def find_mask_token(spec: "SpeculativeConfig") -> int | None:
    """The mask token's id; None for autoregressive drafting.

    Raises:
        ValueError: drafting is parallel, but the drafter has no valid mask.
    """
    if not spec.parallel_drafting:
        return None
    if spec.method == "eagle":
        raise ValueError(
            "parallel_drafting needs a drafter with a learned mask_hidden, which "
            'method "eagle" lacks: use an EAGLE-3 style checkpoint (P-EAGLE) with '
            'method "eagle3".'
        )
    mask = get_mask_token_id(spec.draft_model_config.hf_config)
    vocab = spec.draft_model_config.get_vocab_size()
    if type(mask) is not int or not 0 <= mask < vocab:
        raise ValueError(
            f"parallel_drafting needs a mask token of the draft model's {vocab} "
            f"tokens, but its config names {mask!r}: correct mask_token_id, "
            "pard_token or ptd_token_id in config.json, or unset parallel_drafting."
        )
    return mask


def find_tapped_layers(spec: "SpeculativeConfig") -> tuple[int, ...] | None:
    """Ids of the target's layers whose inputs an EAGLE-3 head is fed.

    Returns:
        None for the target's defaults; empty for heads that are fed its output.

    Raises:
        ValueError: the head was trained for another target.
    """
    config, target = spec.draft_model_config.hf_config, spec.target_model_config
    if spec.method != "eagle3" or not takes_aux_hidden_states(config):
        return ()
    width = getattr(config, "target_hidden_size", None)
    if width is not None and width != target.get_hidden_size():
        raise ValueError(
            f"target_hidden_size of {spec.model} ({width}) must be the target's "
            f"hidden size ({target.get_hidden_size()}): use a head that was trained "
            "for this target."
        )
    ids, depth = tapped_layers(config), target.get_total_num_hidden_layers()
    named = ids or ()
    if len(set(named)) < len(named) or not all(0 <= i <= depth for i in named):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {list(named)} must be "
            f"different layers from 0 to {depth} of the target: use a head that was "
            "trained for this target, or correct them in config.json."
        )
    return ids


def check_engine(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Checks what the engine and the target do for the drafter.

    Raises:
        ValueError: Model Runner V1 orders a head's layers otherwise, the target does
            not return them, its KV blocks are of another size, or a setting that
            quantizes the drafter does nothing.
    """
    spec = vllm_config.speculative_config
    ids = list(drafter.tapped_layers or ())
    if ids != sorted(ids) and not vllm_config.use_v2_model_runner:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids of {spec.model} {ids} are not in "
            "ascending order, in which Model Runner V1 feeds them: turn V1 off."
        )
    _check_aux_hidden_states(spec)
    check_blocks(vllm_config)
    check_quantization(spec)


def _check_aux_hidden_states(spec: "SpeculativeConfig") -> None:
    """Checks that the target returns the hidden states that an EAGLE-3 head is fed."""
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_eagle3

    if spec.method != "eagle3":
        return
    if not takes_aux_hidden_states(spec.draft_model_config.hf_config):
        return
    target = get_model_cls(spec.target_model_config)
    if not supports_eagle3(target):
        raise ValueError(
            f"EAGLE-3 does not support {target.__name__} as a target, which in vLLM "
            f"does not return auxiliary hidden states: use a draft model or PARD "
            f"in the place of {spec.model}."
        )


def check_blocks(vllm_config: "VllmConfig") -> None:
    """Checks that target and drafter can have KV cache blocks of one size on a CPU.

    There vLLM's MLA supports only blocks of 16 tokens, and its other attention only
    multiples of 32. With AMX it has another MLA, which supports those.

    Raises:
        ValueError: they cannot: only one of them has MLA.
    """
    spec = vllm_config.speculative_config
    target, draft = spec.target_model_config, spec.draft_model_config
    if not current_platform.is_cpu():
        return
    if target.use_mla == draft.use_mla:
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


def correct_depth(spec: "SpeculativeConfig", family: str | None) -> None:
    """Corrects `num_hidden_layers` of heads that give the target's number of layers.

    SafeAILab's code ignores it and builds one layer. Their heads for Vicuna say 40.
    """
    draft = spec.draft_model_config
    if family != ONE_LAYER or draft.hf_config.num_hidden_layers == 1:
        return
    tensors = tensor_names(folder) if (folder := Path(spec.model)).is_dir() else ()
    if any(re.search(r"\blayers\.[1-9]", name) for name in tensors):
        return
    logger.info(
        "%s names %d layers; a head of its kind has one, whatever it says.",
        spec.model,
        draft.hf_config.num_hidden_layers,
    )
    draft.hf_config.num_hidden_layers = draft.hf_text_config.num_hidden_layers = 1
    draft.model_arch_config = draft.get_model_arch_config()


def check_architecture(spec: "SpeculativeConfig") -> None:
    """Checks the drafter's layers.

    The state of a Mamba or linear-attention layer includes all tokens that it has
    processed, rejected drafts among them.

    Raises:
        ValueError: the number of KV heads does not divide that of all heads, or a draft
            model has layers with a state.
    """
    draft = spec.draft_model_config
    heads = getattr(draft.hf_text_config, "num_attention_heads", None)
    shared = getattr(draft.hf_text_config, "num_key_value_heads", None) or 1
    # Some models have a list, with a number for each layer.
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise ValueError(
            f"num_attention_heads of {spec.model} ({heads}) must be a multiple of "
            f"num_key_value_heads ({shared}): correct them in config.json."
        )
    if spec.method == "draft_model" and draft.has_inner_state:
        raise ValueError(
            f"{spec.model} ({draft.architectures[0]}) has layers with a state, as "
            "Mamba or linear attention have, which cannot be taken back to the last "
            "accepted token: use a draft model with attention alone."
        )


class _IncompatibleTarget(Exception):
    """Why a drafter cannot be fed the target's hidden states, and what to do."""


def find_target_features(
    vllm_config: "VllmConfig", is_unified: bool
) -> TargetFeatures | None:
    """The target's hidden states that a PARD-2 drafter is fed.

    Returns:
        None if it has to draft without them, which is logged.

    Raises:
        ValueError: the projection's file is broken or contradicts the config.
    """
    spec = vllm_config.speculative_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    try:
        features = _read_features(spec)
        if not is_unified:
            raise _IncompatibleTarget(NOT_UNIFIED)
        if features.tapped and stages > 1:
            raise _IncompatibleTarget(LAST_STAGE)
    except _IncompatibleTarget as why:
        log_without_target(spec.model, str(why))
        return None
    # vLLM reads from here which layers' hidden states the target returns.
    config = spec.draft_model_config.hf_config
    config.eagle_aux_hidden_state_layer_ids = list(features.tapped)
    return features


def log_without_target(model: str, why: str) -> None:
    logger.warning(
        "%s drafts without the target's hidden states, from which a PARD-2 drafter "
        "drafts better: %s.",
        model,
        why,
    )


def _read_features(spec: "SpeculativeConfig") -> TargetFeatures:
    draft, target = spec.draft_model_config, spec.target_model_config
    warp = find_file(spec.model, WARP, spec.revision)
    if warp is None:
        raise _IncompatibleTarget(f"it has no {WARP}. Download that file too")
    tensors = load_warp(warp)
    config, where = draft.hf_config, f"in {spec.model}/config.json"
    has_bias = BIAS in tensors
    if _get(config, "pard2_proj_bias", has_bias) != has_bias:
        raise ValueError(
            f"pard2_proj_bias {where} contradicts {warp}, which "
            f"has {'a' if has_bias else 'no'} {BIAS}: correct it, or {AGAIN}."
        )
    scale = _get(config, "pard2_scale", 0.02)
    check_finite(f"pard2_scale {where}", scale)
    size = _get(config, "pard2_target_dim", 4096)
    check_finite(f"pard2_target_dim {where}", size)
    has_many = _get(config, "pard2_ml", size > 10000)
    usual = MANY_LAYERS if has_many else MANY_LAYERS[:1]
    named = _get(config, "pard2_target_layers", usual)
    check_integers(f"pard2_target_layers {where}", named)
    depth, width = target.get_total_num_hidden_layers(), target.get_hidden_size()
    if not all(-depth - 1 <= layer <= depth for layer in named):
        raise _IncompatibleTarget(
            f"it is fed layers {list(named)}, and the target has {depth}. Use a "
            "drafter that was trained for this target"
        )
    fed = tuple(tensors[WEIGHT].shape)
    wanted = (draft.get_hidden_size(), len(named) * width)
    if fed != wanted:
        raise _IncompatibleTarget(
            f"{WEIGHT} has shape {list(fed)}, and {len(named)} layers of this target "
            f"need {list(wanted)}. Use a drafter that was trained for this target"
        )
    # Indices into the depth + 1 hidden states that transformers returns.
    layers = tuple(layer % (depth + 1) for layer in named)
    return TargetFeatures(layers, depth, float(scale), warp)


def _get(config: Any, key: str, default: Any) -> Any:
    """The value of a key, which may have another name."""
    for name in (key, *OLD_NAMES.get(key, ())):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def warp_here(spec: "SpeculativeConfig") -> Path:
    """The projection's file on this machine.

    A model on the hub may have been resolved on another machine, with another cache.
    """
    warp = spec.drafter.target_features.warp
    if not warp.is_file():
        warp = find_file(spec.model, WARP, spec.revision) or warp
    return warp


def load_warp(file: Path) -> dict[str, torch.Tensor]:
    """The projection's tensors, on the CPU; no code in the file is run.

    Raises:
        ValueError: it is broken, or holds anything else.
    """
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise ValueError(
            f"{file} is broken, or holds more than tensors, which is not loaded "
            f"({first}): {AGAIN}, from a source that you trust."
        ) from None
    names = sorted(tensors) if isinstance(tensors, dict) else []
    if names not in ([WEIGHT], [BIAS, WEIGHT]):
        raise ValueError(
            f"{file} must hold {WEIGHT}, and may hold {BIAS}, but holds "
            f"{names or type(tensors).__name__}: {AGAIN}."
        )
    return tensors


# Settings of the drafter's layers.


def check_window(spec: "SpeculativeConfig") -> None:
    """Checks `draft_window` against the drafter's layers.

    Raises:
        ValueError: some have a larger window of their own, or attend to chunks.
    """
    draft, window = spec.draft_model_config, spec.draft_window
    if window is None:
        return
    layer_window = draft.get_sliding_window() or 0
    if layer_window > window:
        raise ValueError(
            f"draft_window ({window}) must be at least the window that layers of "
            f"{spec.model} have of their own ({layer_window}): raise it, or unset it."
        )
    if draft.attention_chunk_size is not None:
        raise ValueError(
            f"draft_window does not support {spec.model}, some layers of which attend "
            "to chunks in the place of all tokens: unset it."
        )
    if window <= spec.num_speculative_tokens:
        logger.warning(
            "draft_window (%d) is not above num_speculative_tokens (%d): the drafter "
            "sees little but its own drafts. Raise it to the context that it was "
            "trained for, or unset it.",
            window,
            spec.num_speculative_tokens,
        )
    longest = spec.target_model_config.max_model_len
    if window >= longest:
        logger.warning(
            "draft_window (%d) leaves out nothing of the target's max_model_len (%d): "
            "lower it, or unset it.",
            window,
            longest,
        )


def is_quantized_in_files(draft: "ModelConfig") -> bool:
    """Whether a checkpoint holds quantized weights; false for online quantization."""
    return draft.quantization is not None and not _is_online(draft)


def _is_online(draft: "ModelConfig") -> bool:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    names = (*ONLINE_QUANT_SHORTHAND_NAMES, "fp8")  # "fp8" is deprecated
    is_in_files = draft.model_arch_config.quantization_config is not None
    return draft.quantization in names and not is_in_files


def check_quantization(spec: "SpeculativeConfig") -> None:
    """Checks the settings that quantize a drafter while it loads.

    Raises:
        ValueError: they are not supported, or would quantize nothing.
    """
    draft, lm_head = spec.draft_model_config, spec.draft_lm_head_quantization
    if not is_known_kv_cache_dtype(spec.kv_cache_dtype or "auto"):
        raise ValueError(
            f'kv_cache_dtype="{spec.kv_cache_dtype}" of speculative_config is not one '
            f"of {', '.join(KV_CACHE_DTYPES)}: correct it, or leave it out."
        )
    if _is_online(draft) and _quantizes_nothing(draft):
        raise ValueError(
            f'quantization="{draft.quantization}" of speculative_config quantizes '
            f'nothing of {draft.model}: write for example "{EXAMPLE}".'
        )
    settings = {f'quantization="{draft.quantization}"': _is_online(draft)}
    settings["draft_lm_head_quantization"] = lm_head is not None
    for setting, is_set in settings.items():
        if is_set and draft.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{setting} of speculative_config does not support {draft.dtype}: set "
                "--dtype bfloat16, or unset it."
            )
    if lm_head == "nvfp4" and not current_platform.is_cuda():
        raise ValueError(
            'draft_lm_head_quantization="nvfp4" needs an NVIDIA GPU: use "fp8".'
        )


def _quantizes_nothing(draft: "ModelConfig") -> bool:
    from vllm.config.quantization import resolve_quantization_config

    name = "fp8_per_tensor" if draft.quantization == "fp8" else draft.quantization
    found = resolve_quantization_config(name, None)
    # None for names that are also checkpoint formats, which cannot be checked here.
    is_of_experts = found is not None and found.linear is None and not draft.is_moe
    return name == "online" or is_of_experts


def may_quantize_lm_head(spec: "SpeculativeConfig") -> bool:
    """Whether `draft_lm_head_quantization` can apply to the kind of drafter."""
    if why_unsupported(spec) is None:
        return True
    has_head = spec.method in ("eagle", "eagle3", "mtp")
    return has_head and not spec.use_gemma4_mtp()
