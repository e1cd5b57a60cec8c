# SPDX-License-Identifier: Apache-2.0
"""What the user wrote: checked, and filled in from the checkpoint."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from .checkpoint import DraftCheckpoint, needs_model
from .drafter import MAX_NODES, METHODS, DrafterConfig
from .length import DEFAULT_LONGEST, choose_by_default

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Up to so many times as many tokens as it was trained for a drafter may do well.
FAR_BEYOND = 2
# Fields that are not settings.
RESULTS = {"drafter", "is_auto_by_default", "is_trimmed_by_default"}
RESULTS |= {"pass_times", "trimmed_times"}


def check_keys(given: Any, config_class: type) -> None:
    """Checks a speculative config as the user wrote it.

    Args:
        given: the value of --speculative-config.
        config_class: SpeculativeConfig, whose fields are the keys.

    Raises:
        ValueError: it is not a mapping, or has a key that is not known.
    """
    if not isinstance(given, Mapping):
        raise ValueError(
            f"speculative_config must be a JSON object, not {given!r}: write for "
            'example {"model": "amd/PARD-Llama-3.2-1B", "num_speculative_tokens": 7}.'
        )
    known = {field.name for field in fields(config_class)} - RESULTS
    for key in given:
        _check_key(str(key), known)


def _check_key(key: str, known: Collection[str]) -> None:
    name = key.replace("-", "_")
    if name not in known:
        near = get_close_matches(name, known, n=1)
        remedy = f'did you mean "{near[0]}"?' if near else "remove it."
        raise ValueError(f'speculative_config has no key "{key}": {remedy}')


def check_settings(spec: "SpeculativeConfig") -> None:
    """Checks the settings alone.

    Raises:
        ValueError: there is no drafter, or a setting cannot be.
    """
    if needs_model(spec) and spec.model is None:
        raise ValueError(
            'speculative_config has no "model": name the folder or the hub id of a '
            'drafter, or a "method" that needs none, such as "ngram".'
        )
    target = spec.target_model_config
    limit = None if target is None else target.max_model_len
    if limit and spec.max_model_len and spec.max_model_len > limit:
        raise ValueError(
            f"max_model_len of speculative_config ({spec.max_model_len}) must be at "
            f"most the target's ({limit}): lower it, or leave it unset."
        )


def fill_settings(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    """Sets what is unset of method, parallel drafting and number of tokens.

    Raises:
        ValueError: the checkpoint was not trained for what is set, or what it says of
            the number of tokens cannot be.
    """
    _fill_method(spec, checkpoint)
    _fill_parallel_drafting(spec, checkpoint)
    _fill_tensor_parallel_size(spec)
    choose_by_default(spec)
    if spec.num_speculative_tokens is None:
        _fill_num_drafts(spec, checkpoint)
    elif checkpoint.is_parallel:
        _say_if_far_beyond_training(spec, checkpoint)


def _fill_method(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    told, family = checkpoint.method, checkpoint.family
    if told is not None and spec.method not in (None, told):
        by = f"{family.name}: {family.told_by}" if family else "by its tensors"
        logger.warning(
            'method "%s" is set, but %s drafts with "%s" (%s), which is used: unset '
            "method.",
            spec.method,
            spec.model,
            told,
            by,
        )
    spec.method = told or spec.method


def _fill_parallel_drafting(
    spec: "SpeculativeConfig", checkpoint: DraftCheckpoint
) -> None:
    if spec.parallel_drafting is None:
        spec.parallel_drafting = checkpoint.is_parallel
    elif spec.parallel_drafting and checkpoint.mask_token_id is None:
        raise ValueError(
            f"parallel_drafting is set, but {spec.model} was not trained for it: its "
            "config names no mask_token_id, pard_token or ptd_token_id. Unset "
            "parallel_drafting, or use a PARD or P-EAGLE checkpoint."
        )
    elif not spec.parallel_drafting and checkpoint.is_parallel:
        logger.warning(
            "%s was trained for parallel drafting, but parallel_drafting=false makes "
            "it draft one token per pass: unset parallel_drafting to use it as meant.",
            spec.model,
        )


def _fill_tensor_parallel_size(spec: "SpeculativeConfig") -> None:
    """A draft model is split as the target is, on Runner V2 whatever is asked for."""
    target, asked = spec.target_parallel_config, spec.draft_tensor_parallel_size
    if spec.method not in (None, "draft_model") or target is None or asked != 1:
        return
    if (size := target.tensor_parallel_size) != 1:
        logger.warning(
            "draft_tensor_parallel_size=1 is not supported for draft models: %s is "
            "split in %d, as the target is. Leave it unset.",
            spec.model,
            size,
        )
        spec.draft_tensor_parallel_size = None


def _fill_num_drafts(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    number, family = checkpoint.num_speculative_tokens, checkpoint.family
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(
            f"num_depths or speculative_tokens in {spec.model}/config.json must be a "
            f"positive integer, not {number!r}: correct it there, or add "
            '"num_speculative_tokens" to the speculative config.'
        )
    spec.num_speculative_tokens = number or (family and family.num_drafts)
    if spec.num_speculative_tokens is None and spec.method in METHODS:
        spec.num_speculative_tokens = DEFAULT_LONGEST


def _say_if_far_beyond_training(
    spec: "SpeculativeConfig", checkpoint: DraftCheckpoint
) -> None:
    """Masks far behind those that it was trained on are drafted all the same, in vain.

    Checkpoints of PARD and PARD-2 do not say how many those were.
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


def check_width(spec: "SpeculativeConfig") -> None:
    """Checks `parallel_drafting_width`, once all else is filled in.

    Raises:
        ValueError: it is more than there is to draft, or drafts are not parallel.
    """
    width, drafts = spec.parallel_drafting_width, spec.num_speculative_tokens
    if width is not None and not (spec.parallel_drafting and spec.method in METHODS):
        raise ValueError(
            "parallel_drafting_width needs a drafter trained for parallel drafting, "
            "and parallel_drafting not set to false."
        )
    if width is not None and width > drafts:
        raise ValueError(
            f"parallel_drafting_width ({width}) must be at most "
            f"num_speculative_tokens ({drafts})."
        )


def check_tree(spec: "SpeculativeConfig", drafter: DrafterConfig) -> None:
    """Checks `draft_tree`, once all else is filled in.

    Raises:
        ValueError: such a tree cannot be drafted, or not be verified.
    """
    nodes, depth = spec.draft_tree, drafter.num_speculative_tokens
    if nodes is None:
        return
    if drafter.method not in METHODS or not drafter.is_parallel:
        raise ValueError(
            "draft_tree needs a drafter that drafts all tokens in one pass: use a "
            "PARD, PARD-2 or P-EAGLE checkpoint, without parallel_drafting=false, or "
            "unset draft_tree."
        )
    if drafter.parallel_width < depth:
        raise ValueError(
            f"draft_tree needs all {depth} tokens drafted in one pass, not "
            f"{drafter.parallel_width}: unset it, or parallel_drafting_width."
        )
    if nodes < depth:  # its field refuses more than MAX_NODES
        raise ValueError(
            f"draft_tree ({nodes}) must be from num_speculative_tokens ({depth}), the "
            f"chain that it begins with, to {MAX_NODES}: change one of the two."
        )
    _check_verification(spec)


def _check_verification(spec: "SpeculativeConfig") -> None:
    wanted = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}
    for name, value in wanted.items():
        if (found := getattr(spec, name)) != value:
            raise ValueError(
                f'draft_tree does not support {name}="{found}": leave it unset. Output '
                "has the target's distribution all the same."
            )
