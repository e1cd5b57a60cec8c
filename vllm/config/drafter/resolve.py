# SPDX-License-Identifier: Apache-2.0
"""Resolves the user's settings and a drafter's files: two steps, each done once.

`fills_settings` wraps `SpeculativeConfig.__post_init__`: settings that are unset are
taken from the drafter's files. `resolve_drafter` sets `drafter` and what vLLM itself
reads of it, once the engine's config is complete; nothing assigns them afterwards.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

from vllm.engine.config_error import names_drafter
from vllm.logger import init_logger

from .drafter import BLOCK_METHODS, NAMES, OWN_CHECKPOINTS, DrafterConfig
from .families import DraftCheckpoint, default_layers, find_no_lattice
from .files import find_checkpoint, has_word
from .length import (
    check_auto,
    check_lengths,
    fill_length,
    is_auto,
    settle_lengths,
    verify_whole_trees,
)
from .support import (
    check_blocks,
    check_layers,
    check_parallelism,
    check_speculator,
    find_unsupported,
    log_who_drafts,
    settle_ranks,
)
from .target import (
    check_architecture,
    check_block,
    correct_depth,
    find_context,
    find_mask_token,
    find_tapped_layers,
    find_target_features,
    map_vocabularies,
    match_vocabularies,
)
from .weights import check_weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# A drafter may do well up to this multiple of the tokens that it was trained for.
FAR_BEYOND = 2
# Methods that an explicit setting decides, whatever the path.
HEADS = ("eagle", "eagle3", "dflash", "dspark")


# With the speculative config: settings that are unset.


def fills_settings(
    post_init: Callable[["SpeculativeConfig"], None],
) -> Callable[["SpeculativeConfig"], None]:
    """Wraps `SpeculativeConfig.__post_init__`, where vLLM reads the draft model's
    config: fills in settings from the checkpoint before it."""

    @wraps(post_init)
    def fill(self: "SpeculativeConfig") -> None:
        self.draft_checkpoint = read_files(self)
        with names_drafter(self):
            post_init(self)
        check_auto(self)
        verify_whole_trees(self)

    return fill


def read_files(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """Fills in unset settings from the checkpoint; refuses settings that contradict it.

    Returns:
        What its files say; None if they do not tell the method, for which vLLM then
        goes by words in its path, or if the method has one of vLLM's speculators.
    """
    if spec.method in NAMES:
        spec.method = NAMES[spec.method]
        if spec.parallel_drafting is None:
            spec.parallel_drafting = True
    target = spec.target_model_config
    limit = None if target is None else target.max_model_len
    if limit and spec.max_model_len and spec.max_model_len > limit:
        raise ValueError(
            f"max_model_len of speculative_config ({spec.max_model_len}) must be at "
            f"most the target's ({limit}): lower it, or leave it unset."
        )
    checkpoint = find_checkpoint(spec)
    if checkpoint is not None:
        _fill_method(spec, checkpoint)
        if spec.method in (None, *OWN_CHECKPOINTS):
            _fill_parallel_drafting(spec, checkpoint)
        _fill_num_drafts(spec, checkpoint)
    elif spec.method == "mtp":
        fill_length(spec)  # vLLM names the target as the model only if K is known
    if checkpoint is None or spec.method not in OWN_CHECKPOINTS:
        spec.parallel_drafting = bool(spec.parallel_drafting)
        return None
    return checkpoint


def is_settled(spec: "SpeculativeConfig") -> bool:
    """Whether words in the path must not decide a config's method.

    Its files, or the user, have decided. With "mtp" vLLM looks for other reasons.
    """
    if spec.method == "mtp":
        return has_word(spec)
    return spec.draft_checkpoint is not None or spec.method in HEADS


def fit_modules(spec: "SpeculativeConfig", num_modules: int | None) -> None:
    """Drafts a token with each MTP module, if nobody set K, and vLLM's own speculators
    run them."""
    if spec.is_auto_by_default and num_modules and find_unsupported(spec) is not None:
        spec.num_speculative_tokens = num_modules


def _fill_method(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    found, family = checkpoint.method, checkpoint.family
    if found is not None and spec.method not in (None, found):
        logger.warning(
            'method "%s" is set, but %s drafts with "%s" (%s), which is used: unset '
            "method.",
            spec.method,
            spec.model,
            found,
            f"{family.name}: {family.signs}" if family else "by its tensors",
        )
    spec.method = found or spec.method


def _fill_parallel_drafting(
    spec: "SpeculativeConfig", checkpoint: DraftCheckpoint
) -> None:
    if spec.parallel_drafting is None:
        spec.parallel_drafting = checkpoint.is_parallel
    elif spec.parallel_drafting and checkpoint.mask_token_id is None:
        raise ValueError(
            f"parallel_drafting is set, but {spec.model} was not trained for it: its "
            "config names no mask_token_id, pard_token or ptd_token_id. Unset "
            'parallel_drafting, or a method that means it such as "pard", or use a '
            "PARD or P-EAGLE checkpoint."
        )
    elif not spec.parallel_drafting and checkpoint.is_parallel:
        logger.warning(
            "%s was trained for parallel drafting, but parallel_drafting=false makes "
            "it draft one token per pass: unset parallel_drafting to use it as meant.",
            spec.model,
        )


def _fill_num_drafts(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    """Fills in K; warns if it is far above the trained one. A block has no more.

    Checkpoints of PARD and PARD-2 do not say what they were trained for.
    """
    trained, family = checkpoint.num_speculative_tokens, checkpoint.family
    fill_length(spec, trained, family and family.num_drafts)
    drafts = spec.num_speculative_tokens
    if drafts is not None and (type(drafts) is not int or drafts < 1):
        raise ValueError(
            f"num_depths or speculative_tokens in {spec.model}/config.json must be a "
            f"positive integer, not {trained!r}: correct it there, or add "
            '"num_speculative_tokens" to the speculative config.'
        )
    if not checkpoint.is_parallel or type(trained) is not int:
        return
    # A block has no rows behind its end that were trained.
    is_block = spec.method in BLOCK_METHODS
    most = trained if is_block else FAR_BEYOND * trained
    if drafts > most > 0:
        logger.warning(
            "num_speculative_tokens is %d, but %s was trained to draft %d tokens at "
            "once: those far behind them are %s. Lower it, or leave it unset.",
            drafts,
            spec.model,
            trained,
            "not drafted" if is_block else "hardly accepted",
        )
        spec.num_speculative_tokens = most if is_block else drafts


# With the engine's config: the drafter.


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
        check_layers(vllm_config, drafter)
    if is_checked:
        drafter = _read_models(vllm_config, drafter)
        _log_models(spec, drafter)
    drafter, schedule, is_trimmed = settle_lengths(vllm_config, drafter)
    check_speculator(vllm_config, drafter, schedule, is_trimmed)
    if is_checked or drafter.is_block:
        check_parallelism(vllm_config, drafter.is_fitted)
    if is_checked:
        settle_ranks(spec, drafter.is_unified)
        check_layers(vllm_config, drafter)
        check_blocks(vllm_config)
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
    """Logs what a checkpoint comes to; warns of the target as its own drafter."""
    models = spec.model, spec.target_model_config.model
    if spec.method == "draft_model" and len(set(map(os.path.realpath, models))) == 1:
        logger.warning(
            "%s is its own draft model: a draft takes as long as a token of the "
            "target, so nothing is gained. Name a smaller model of its vocabulary.",
            spec.model,
        )
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
