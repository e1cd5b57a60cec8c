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

from .drafter import METHODS, NAMES, DrafterConfig
from .families import DraftCheckpoint, default_layers
from .files import find_checkpoint, has_word
from .length import (
    DEFAULT_LONGEST,
    check_auto,
    check_schedule,
    check_tree,
    check_width,
    fill_length,
    fill_schedule,
    is_auto,
    settle_lengths,
    verify_whole_trees,
)
from .support import (
    check_needs_unified,
    check_others_choose,
    check_parallelism,
    find_unsupported,
    log_who_drafts,
    settle_ranks,
)
from .target import (
    check_architecture,
    check_engine,
    check_window,
    correct_depth,
    find_context,
    find_mask_token,
    find_tapped_layers,
    find_target_features,
)
from .vocabulary import map_vocabularies, match_vocabularies
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
    config: fills in settings from the checkpoint before it.

    Raises:
        ValueError: the config cannot draft; the error says what to change.
    """

    @wraps(post_init)
    def fill(self: "SpeculativeConfig") -> None:
        self.draft_checkpoint = read_files(self)
        with names_drafter(self):
            post_init(self)
        check_auto(self)
        verify_whole_trees(self)

    return fill


def read_files(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """Fills in unset settings from the checkpoint.

    Returns:
        What its files say; None if they do not tell the method, for which vLLM then
        goes by words in its path, or if the method has one of vLLM's speculators.

    Raises:
        ValueError: the files are missing or cannot be a drafter's, or they contradict
            what is set.
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
        fill_settings(spec, checkpoint)
    if checkpoint is None or spec.method not in METHODS:
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


def fill_settings(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    """Fills in method, parallel drafting and number of tokens where they are unset.

    Raises:
        ValueError: the checkpoint was not trained for what is set, or its number of
            tokens is invalid.
    """
    _fill_method(spec, checkpoint)
    if spec.method in (None, *METHODS):
        _fill_parallel_drafting(spec, checkpoint)
    fill_schedule(spec)
    if spec.num_speculative_tokens is None:
        _fill_num_drafts(spec, checkpoint)
    elif checkpoint.is_parallel:
        _log_if_far_beyond_training(spec, checkpoint)


def _fill_method(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    found, family = checkpoint.method, checkpoint.family
    if found is not None and spec.method not in (None, found):
        by = f"{family.name}: {family.evidence}" if family else "by its tensors"
        logger.warning(
            'method "%s" is set, but %s drafts with "%s" (%s), which is used: unset '
            "method.",
            spec.method,
            spec.model,
            found,
            by,
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
    number, family = checkpoint.num_speculative_tokens, checkpoint.family
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(
            f"num_depths or speculative_tokens in {spec.model}/config.json must be a "
            f"positive integer, not {number!r}: correct it there, or add "
            '"num_speculative_tokens" to the speculative config.'
        )
    usual = family and family.num_drafts
    if usual and is_auto(spec):
        usual = max(usual, DEFAULT_LONGEST)  # a maximum, not drafted in every step
    spec.num_speculative_tokens = number or usual
    fill_length(spec)


def _log_if_far_beyond_training(
    spec: "SpeculativeConfig", checkpoint: DraftCheckpoint
) -> None:
    """Warns if K is far above what the drafter was trained for, which is in vain.

    Checkpoints of PARD and PARD-2 do not say what they were trained for.
    """
    asked, trained = spec.num_speculative_tokens, checkpoint.num_speculative_tokens
    if type(trained) is int and asked > FAR_BEYOND * trained > 0:
        logger.warning(
            "num_speculative_tokens is %d, but %s was trained to draft %d tokens at "
            "once: those far behind them are hardly accepted. Lower it, or leave it "
            "unset.",
            asked,
            spec.model,
            trained,
        )


# With the engine's config: the drafter.


def resolve_drafter(vllm_config: "VllmConfig") -> None:
    """Resolves the drafter, decides which speculator drafts, and checks all files.

    Sets `drafter` of the speculative config and, for vLLM's code to read, what follows
    from it: a step's most draft tokens, their schedule, adaptive verification. Does
    nothing for a speculative config that is resolved.

    Raises:
        ValueError: the drafter's files are broken or do not fit the target, settings
            contradict each other, or one needs the unified speculator, which cannot
            run.
    """
    spec = vllm_config.speculative_config
    if spec is None or spec.drafter is not None:
        return
    drafter = _read_settings(vllm_config)
    check_tree(spec, drafter)
    has_models = None not in (spec.target_model_config, spec.draft_model_config)
    if spec.method in METHODS and has_models:
        drafter = _read_models(vllm_config, drafter)
        _warn_of_target(spec)
        logger.info("%s", describe(spec, drafter))
    drafter, schedule, is_trimmed = settle_lengths(vllm_config, drafter)
    check_schedule(spec, drafter.num_verified)
    check_needs_unified(spec, drafter)
    check_others_choose(vllm_config, drafter, schedule, is_trimmed)
    if spec.method in METHODS and has_models:
        check_parallelism(vllm_config, drafter.is_unified)
        settle_ranks(spec, drafter.is_unified)
        check_engine(vllm_config, drafter)
        check_weights(vllm_config, drafter)
    if not drafter.is_unified:
        log_who_drafts(vllm_config, drafter)
    spec.drafter = drafter
    # vLLM's word for all draft tokens that a step verifies: of a tree, its nodes.
    spec.num_speculative_tokens = drafter.num_verified
    spec.num_speculative_tokens_per_batch_size = schedule
    spec.enable_adaptive_verification = is_trimmed


def _read_settings(vllm_config: "VllmConfig") -> DrafterConfig:
    """What the user's settings come to in the engine, without the models."""
    spec = vllm_config.speculative_config
    check_width(spec)
    unsupported = find_unsupported(spec)
    if unsupported is None and getattr(vllm_config, "watermark_config", None):
        unsupported = "watermarking"
    is_unified = unsupported is None and vllm_config.use_v2_model_runner
    width = spec.parallel_drafting_width or spec.num_speculative_tokens
    return DrafterConfig(
        method=spec.method,
        num_speculative_tokens=spec.num_speculative_tokens,
        is_parallel=spec.parallel_drafting,
        parallel_width=width if spec.parallel_drafting else 1,
        num_nodes=spec.draft_tree,
        unsupported=unsupported,
        is_unified=is_unified,
    )


def _read_models(vllm_config: "VllmConfig", drafter: DrafterConfig) -> DrafterConfig:
    """What the drafter's checkpoint comes to beside the target."""
    spec = vllm_config.speculative_config
    found = spec.draft_checkpoint
    family = found.family.name if found and found.family else None
    check_architecture(spec)
    check_window(spec)
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


def describe(spec: "SpeculativeConfig", drafter: DrafterConfig) -> str:
    """How a checkpoint was resolved, for a log line."""
    family = f"family {drafter.family!r}, " if drafter.family else ""
    most = "up to " if is_auto(spec) else ""
    tree = f"trees of {most}{drafter.num_nodes} nodes, " if drafter.num_nodes else ""
    mask = f"mask token {drafter.mask_token_id}, " if drafter.is_parallel else ""
    window = f", within a window of {spec.draft_window}" if spec.draft_window else ""
    return (
        f"Drafter {spec.model}: {family}method {drafter.method}, "
        f"{drafter.num_speculative_tokens} tokens a step, {tree}"
        f"{drafter.parallel_width} a pass, {mask}fed by {_fed_by(spec, drafter)}"
        f"{window}."
    )


def _fed_by(spec: "SpeculativeConfig", drafter: DrafterConfig) -> str:
    if drafter.target_features is not None:
        return f"layers {drafter.target_features.layers}"
    if drafter.method == "draft_model":
        return "tokens alone"
    if drafter.tapped_layers is None:
        depth = spec.target_model_config.get_total_num_hidden_layers()
        return f"layers {default_layers(depth)}, the target's defaults"
    return (
        f"layers {drafter.tapped_layers}" if drafter.tapped_layers else "the last layer"
    )


def _warn_of_target(spec: "SpeculativeConfig") -> None:
    models = spec.model, spec.target_model_config.model
    if spec.method == "draft_model" and len(set(map(os.path.realpath, models))) == 1:
        logger.warning(
            "%s is its own draft model: a draft takes as long as a token of the "
            "target, so nothing is gained. Name a smaller model of its vocabulary.",
            spec.model,
        )
