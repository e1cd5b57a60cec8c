# SPDX-License-Identifier: Apache-2.0
"""Resolves a speculative config, once the engine's config is complete, and says which
speculator drafts: the unified one, or one of vLLM's own.

`resolve_drafter` sets `drafter`, which nothing assigns afterwards, and what vLLM itself
reads of it. Of that, what attention does not support is unset once it is known: trees
(`draft_trees.py`), trimming (`trimming.py`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils.compiled import COMPILED

from . import BLOCK_METHODS, METHODS, OWN_CHECKPOINTS, DrafterConfig, first_of
from .files import default_layers
from .length import AUTO, V1, check_lengths, drafts_unified, is_auto, settle_lengths
from .target import (
    check_architecture,
    check_block,
    check_layers,
    check_parallelism,
    correct_depth,
    find_context,
    find_mask_token,
    find_tapped_layers,
    find_target_features,
    map_vocabularies,
    match_vocabularies,
    settle_ranks,
)
from .weights import check_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Of a position, in a lattice: its edges are the square of it.
MAX_CANDIDATES = 64
# MTP modules that are fed the target's last hidden states and attend to all tokens.
# Others are fed other states, share KV or indices, or need kernels of their own.
MTP_MODULES = (
    "DeepSeekMTPModel",
    "ErnieMTPModel",
    "ExaoneMoeMTP",
    "Glm4MoeLiteMTPModel",
    "Glm4MoeMTPModel",
    "MiMoMTPModel",
    "NemotronHMTPModel",
    "Qwen3NextMTP",
    "Qwen3_5MTP",
    "Qwen3_5MoeMTP",
)
# DSpark drafters whose Markov head is a bias by the token before.
DSPARK_LATTICES = ("Qwen3DSparkModel", "Qwen3OmniDSparkModel")


def resolve_drafter(vllm_config: "VllmConfig") -> None:
    """Resolves the drafter, decides which speculator drafts, and checks all files.

    Sets `drafter` of the speculative config and, for vLLM's code to read, what follows
    from it: a step's most draft tokens, their schedule, adaptive verification. Does
    nothing for a speculative config that is resolved. Refuses files that are broken or
    do not fit the target, and settings that contradict each other or the engine.
    """
    spec = vllm_config.speculative_config
    if spec is None or spec.drafter is not None:
        return
    drafter = _read_settings(vllm_config)
    check_lengths(spec, drafter)
    has_models = None not in (spec.target_model_config, spec.draft_model_config)
    has_own = spec.method in OWN_CHECKPOINTS
    is_checked = (has_own or drafter.is_unified) and has_models
    if spec.method in BLOCK_METHODS and has_models:
        check_block(spec)
        drafter = replace(drafter, tapped_layers=find_tapped_layers(spec))
    if is_checked:
        drafter = _read_models(vllm_config, drafter)
        _log_models(spec, drafter)
    drafter, schedule, is_trimmed = settle_lengths(vllm_config, drafter)
    check_speculator(vllm_config, drafter)
    check_layers(vllm_config, drafter)
    if is_checked or drafter.is_block:
        check_parallelism(vllm_config, drafter.is_fitted)
    if is_checked:
        settle_ranks(spec, drafter.is_unified)
    if is_checked and has_own:
        check_weights(vllm_config, drafter)
    log_who_drafts(vllm_config, drafter)
    spec.drafter = drafter
    # vLLM's word for all draft tokens that a step verifies: of a tree, its nodes.
    spec.num_speculative_tokens = drafter.num_verified
    spec.num_speculative_tokens_per_batch_size = schedule
    spec.enable_adaptive_verification = is_trimmed


def _read_settings(vllm_config: "VllmConfig") -> DrafterConfig:
    """What the user's settings come to in the engine, without the models."""
    spec = vllm_config.speculative_config
    unsupported = find_unsupported(spec)
    if unsupported is None and getattr(vllm_config, "watermark_config", None):
        unsupported = "watermarking"
    width = spec.parallel_drafting_width or spec.num_speculative_tokens
    is_block = spec.method in BLOCK_METHODS and vllm_config.use_v2_model_runner
    return DrafterConfig(
        method=spec.method,
        num_speculative_tokens=spec.num_speculative_tokens,
        is_parallel=spec.parallel_drafting,
        parallel_width=width if spec.parallel_drafting else 1,
        num_nodes=spec.draft_tree,
        unsupported=unsupported,
        is_unified=unsupported is None and vllm_config.use_v2_model_runner,
        is_block=is_block,
        no_lattice=find_no_lattice(vllm_config) if is_block else None,
    )


def _read_models(vllm_config: "VllmConfig", drafter: DrafterConfig) -> DrafterConfig:
    """What the drafter's checkpoint comes to beside the target."""
    spec = vllm_config.speculative_config
    found = spec.draft_checkpoint
    family = found.family.name if found and found.family else None
    check_architecture(spec)
    correct_depth(spec, family)
    drafter = replace(
        drafter,
        family=family,
        context=find_context(spec),
        tapped_layers=find_tapped_layers(spec),
        checkpoint_vocab_size=match_vocabularies(spec),
        vocabulary=map_vocabularies(spec),
        mask_token_id=find_mask_token(spec),
    )
    if family == "PARD-2":
        features = find_target_features(vllm_config, drafter.is_unified)
        layers = features.tapped if features else ()
        drafter = replace(drafter, target_features=features, tapped_layers=layers)
    return drafter


def _log_models(spec: "SpeculativeConfig", drafter: DrafterConfig) -> None:
    """Logs what a checkpoint comes to."""
    layers = drafter.tapped_layers
    if drafter.target_features is not None:
        fed = f"layers {drafter.target_features.layers}"
    elif drafter.method == "draft_model":
        fed = "tokens alone"
    elif layers is None:
        depth = spec.target_model_config.get_total_num_hidden_layers()
        fed = f"layers {default_layers(depth)}, the target's defaults"
    else:
        fed = f"layers {layers}" if layers else "the last layer"
    most = "up to " if is_auto(spec) else ""
    parts = {
        f"family {drafter.family!r}": drafter.family,
        f"method {drafter.method}": True,
        f"{drafter.num_speculative_tokens} tokens a step": True,
        f"trees of {most}{drafter.num_nodes} nodes": drafter.num_nodes,
        f"{drafter.parallel_width} a pass": True,
        f"mask token {drafter.mask_token_id}": drafter.is_parallel,
        f"fed by {fed}": True,
        f"within a window of {spec.draft_window}": spec.draft_window,
    }
    said = ", ".join(part for part, is_said in parts.items() if is_said)
    logger.info("Drafter %s: %s.", spec.model, said)


# Which speculator drafts.


def fit_modules(spec: "SpeculativeConfig", num_modules: int | None) -> None:
    """Drafts a token with each MTP module, if nobody set K, and vLLM's own speculators
    run them."""
    if spec.is_auto_by_default and num_modules and find_unsupported(spec) is not None:
        spec.num_speculative_tokens = num_modules


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
    if spec.method == "mtp":
        config, name = draft.hf_config, draft.architectures[0]
        has_several = (getattr(config, "n_predict", None) or 1) > 1
        is_alone = spec.num_speculative_tokens == 1 and spec.draft_tree is None
        shares_indices = getattr(config, "index_share_for_mtp_iteration", False)
        reasons |= {
            "several MTP modules": has_several and not is_alone,
            f"the MTP modules of {name}": name not in MTP_MODULES,
            "MTP modules with sparse attention": hasattr(config, "index_topk")
            or spec.index_share_for_mtp_iteration
            or shares_indices,
        }
    return first_of(reasons)


def find_no_lattice(vllm_config: "VllmConfig") -> str | None:
    """Why no trees can be grown from the block of a method in `BLOCK_METHODS`; None if
    they can."""
    from vllm.config.speculative import XPRESS_ARCHITECTURES

    spec = vllm_config.speculative_config
    if (draft := spec.draft_model_config) is None:
        return "a drafter without a model config"
    name = draft.architectures[0]
    is_dspark = spec.method == "dspark"
    block = getattr(draft.hf_config, "dflash_config", None) or {}
    reasons = {
        # Their scores depend on the whole path, or on a head of another form.
        f"{name}, whose scores depend on the whole path": name in XPRESS_ARCHITECTURES,
        f"{name}": is_dspark and name not in DSPARK_LATTICES,
        "dspark_draft_topk": is_dspark
        and getattr(draft.hf_config, "dspark_draft_topk", None) is not None,
        f"a selector_top_k above {MAX_CANDIDATES}": (
            block.get("selector_top_k", 0) > MAX_CANDIDATES
        ),
        "use_local_argmax_reduction": spec.use_local_argmax_reduction,
        "a quantized Markov head": is_dspark and draft.quantization is not None,
        "watermarking": getattr(vllm_config, "watermark_config", None) is not None,
    }
    return first_of(reasons)


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
    return spec.method in BLOCK_METHODS or find_unsupported(spec) is None


def keeps_token_budget(vllm_config: "VllmConfig") -> bool:
    """Whether the target keeps its whole token budget, which is set here: the unified
    speculator has its own buffers."""
    if not drafts_unified(vllm_config.speculative_config):
        return False
    scheduler = vllm_config.scheduler_config
    if scheduler.max_num_scheduled_tokens is None:
        scheduler.max_num_scheduled_tokens = scheduler.max_num_batched_tokens
    return True


def may_quantize_lm_head(spec: "SpeculativeConfig") -> bool:
    """Whether `draft_lm_head_quantization` can apply to the kind of drafter."""
    if find_unsupported(spec) is None:
        return True
    return spec.method in ("eagle", "eagle3", "mtp") and not spec.use_gemma4_mtp()


def check_speculator(vllm_config: "VllmConfig", drafter: DrafterConfig) -> None:
    """Refuses settings that only the unified speculator supports if another drafts."""
    spec = vllm_config.speculative_config
    is_own_v1 = drafter.method in BLOCK_METHODS and not drafter.is_block
    found = V1 if is_own_v1 else drafter.unsupported or V1
    drawn = f"draft_sample_method={spec.draft_sample_method} with"
    is_head = spec.method in ("eagle", "eagle3", "mtp")  # vLLM's also quantize
    asked = {
        "parallel_drafting_width": spec.parallel_drafting_width is not None,
        "draft_tree": spec.draft_tree is not None and not drafter.can_draft_trees,
        "draft_window": spec.draft_window is not None,
        f"{drawn} use_heterogeneous_vocab": spec.use_heterogeneous_vocab
        and spec.draft_sample_method != "greedy",
        "draft_lm_head_quantization": spec.draft_lm_head_quantization is not None
        and not is_head,
    }
    setting = first_of(asked)
    if setting is not None and not drafter.is_unified:
        raise ValueError(
            f"{setting} does not support {found}: turn that off, or unset "
            f"{setting.partition('=')[0]}."
        )


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
