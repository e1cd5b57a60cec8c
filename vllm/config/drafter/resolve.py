# SPDX-License-Identifier: Apache-2.0
"""Resolves the user's settings and a drafter's files into a `DrafterConfig`."""

import json
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from pydantic_core import PydanticCustomError, ValidationError

from vllm.logger import init_logger

from .checkpoint import (
    find_checkpoint,
    has_word,
    load_config,
    names_a_path,
    needs_model,
)
from .drafter import METHODS, NAMES, DrafterConfig
from .engine import find_unsupported
from .families import DraftCheckpoint, default_layers
from .folder import check_folder, check_name
from .hub import check_hub, check_root
from .length import (
    DEFAULT_LONGEST,
    check_auto,
    check_tree,
    check_width,
    choose_by_default,
    fill_from_schedule,
    fill_length,
    is_auto,
    verify_whole_trees,
)
from .overrides import overridden
from .target import (
    check_attention,
    check_states,
    correct_depth,
    find_context,
    find_mask_token,
    find_tapped_layers,
    find_target_features,
)
from .values import check_values
from .vocabulary import map_vocabularies, match_vocabularies
from .window import check_window

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

EXAMPLE = '{"model": "amd/PARD-Llama-3.2-1B", "num_speculative_tokens": 7}'
# A drafter may do well up to this multiple of the tokens that it was trained for.
FAR_BEYOND = 2
# Methods that an explicit setting, or a file, decides.
HEADS = ("eagle", "eagle3", "dflash", "dspark")
# Fields of SpeculativeConfig that are results, not settings. The method
# "extract_hidden_states" has a setting of the name `draft_model_config`.
RESULTS = {"drafter", "is_auto_by_default", "is_trimmed_by_default"}
RESULTS |= {"pass_times", "trimmed_times"}
RESULTS |= {"target_model_config", "target_parallel_config"}
RESULTS |= {"draft_model_config", "draft_parallel_config"}
# vLLM's errors for a draft model's config that it cannot read (the part to quote), and
# what to change. Its errors for the target read the same, so ours name the drafter.
REMEDIES = {
    r"Model architectures \[.*?\] are not supported": (
        'correct "architectures" in its config.json, or name another drafter'
    ),
    r"model type `.*?` but Transformers does not recognize this architecture": (
        'correct "model_type" in its config.json, or update transformers'
    ),
    r"Unsupported model_type .*? for \w+ speculator": (
        'correct "model_type" in transformer_layer_config of its config.json, or name '
        "another drafter"
    ),
    r"Unknown quantization method: .*?\]": (
        'correct "quantization" of speculative_config, or leave it unset; the '
        "checkpoint's own is quant_method in its config.json"
    ),
    r"Quantization method specified in the model config .*? argument \(.*?\)": (
        'leave "quantization" of speculative_config unset'
    ),
    r"Validation error for field .*": "correct it in its config.json",
}


def resolves_drafter(
    post_init: Callable[["SpeculativeConfig"], None],
) -> Callable[["SpeculativeConfig"], None]:
    """Wraps `SpeculativeConfig.__post_init__`, where vLLM reads the draft model's
    config: fills in settings from the checkpoint before it, and sets `drafter` after.

    Raises:
        ValueError: the config cannot draft; the error says what to change.
    """

    @wraps(post_init)
    def resolve(self: "SpeculativeConfig") -> None:
        read_name(self)
        check_settings(self)
        self.drafter = read_files(self)
        with _named_errors(self):
            post_init(self)
        self.drafter = compare_with_target(self)
        self.num_speculative_tokens = self.drafter.num_verified

    return resolve


def read_files(spec: "SpeculativeConfig") -> DrafterConfig | None:
    """Fills in unset settings from the checkpoint.

    Returns:
        What is known of the drafter so far; None if its files do not tell the method,
        for which vLLM then goes by words in its path.
    """
    config = _read(spec)
    checkpoint = None if config is None else find_checkpoint(spec, config)
    if checkpoint is not None:
        fill_settings(spec, checkpoint)
    if checkpoint is None or spec.method not in METHODS:
        spec.parallel_drafting = bool(spec.parallel_drafting)
        return None
    family = checkpoint.family and checkpoint.family.name
    return DrafterConfig(spec.method, spec.num_speculative_tokens, family)


def _read(spec: "SpeculativeConfig") -> Mapping[str, Any] | None:
    """The drafter's config.json with the user's overrides; None if vLLM is to read it.

    Raises:
        ValueError: it is missing, or cannot be a drafter's.
    """
    if not needs_model(spec):
        return None
    check_hub(spec)
    if names_a_path(spec.model):
        check_folder(spec)
    if (config := load_config(spec)) is None:
        check_root(spec)
        return None
    config = overridden(config, spec.hf_overrides)
    check_values(spec.model, config)
    return config


def is_settled(spec: "SpeculativeConfig") -> bool:
    """Whether words in the path must not decide a config's method.

    Its files, or the user, have decided. With "mtp" vLLM looks for other reasons.
    """
    if spec.method == "mtp":
        return has_word(spec)
    return spec.drafter is not None or spec.method in HEADS


def compare_with_target(spec: "SpeculativeConfig") -> DrafterConfig:
    """Resolves the drafter, once both models' configs are known."""
    check_width(spec)
    check_auto(spec)
    verify_whole_trees(spec)
    width = spec.parallel_drafting_width or spec.num_speculative_tokens
    drafter = DrafterConfig(
        method=spec.method,
        num_speculative_tokens=spec.num_speculative_tokens,
        family=spec.drafter and spec.drafter.family,
        is_parallel=spec.parallel_drafting,
        parallel_width=width if spec.parallel_drafting else 1,
        num_nodes=spec.draft_tree,
        unsupported=find_unsupported(spec),
    )
    check_tree(spec, drafter)
    has_configs = None not in (spec.target_model_config, spec.draft_model_config)
    if spec.method in METHODS and has_configs:
        drafter = _compare_configs(spec, drafter)
        _say_if_target(spec)
        logger.info("%s", describe(spec, drafter))
    return drafter


def _compare_configs(
    spec: "SpeculativeConfig", drafter: DrafterConfig
) -> DrafterConfig:
    check_attention(spec)
    check_states(spec)
    check_window(spec)
    correct_depth(spec, drafter.family)
    context, tapped = find_context(spec), find_tapped_layers(spec)
    features = find_target_features(spec, drafter.family)
    return replace(
        drafter,
        context=context,
        tapped_layers=features.tapped if features else tapped,
        target_features=features,
        checkpoint_vocab_size=match_vocabularies(spec),
        vocabulary=map_vocabularies(spec),
        mask_token_id=find_mask_token(spec),
    )


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


def _say_if_target(spec: "SpeculativeConfig") -> None:
    models = spec.model, spec.target_model_config.model
    if spec.method == "draft_model" and len(set(map(os.path.realpath, models))) == 1:
        logger.warning(
            "%s is its own draft model: a draft takes as long as a token of the "
            "target, so nothing is gained. Name a smaller model of its vocabulary.",
            spec.model,
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


@contextmanager
def _named_errors(spec: "SpeculativeConfig") -> Iterator[None]:
    """Names the drafter in errors that vLLM raises while it reads its config."""
    try:
        yield
    except (ValueError, StrictDataclassError) as error:
        named = _named(spec.model, str(error))
        if named is None:
            raise
        raise ValueError(named) from None


def _named(model: str | None, error: str) -> str | None:
    error = " ".join(error.split())
    for pattern, remedy in REMEDIES.items():
        if found := re.search(pattern, error):
            return f'"model" of speculative_config: {model}: {found[0]}: {remedy}.'
    return None


def parse_speculative_config(text: str) -> Any:
    """The value of --speculative-config: JSON, or a drafter's folder or hub id alone.

    Raises:
        ArgumentTypeError: it looks like JSON, but is not valid.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        if not re.fullmatch(r"[^\s{}\[\]\"']+", text):
            raise ArgumentTypeError(
                f"{text} is not valid JSON ({error}): write for example {EXAMPLE}, in "
                "single quotes on a command line."
            ) from None
        return {"model": text}


def check_keys(given: Any, config_class: type) -> None:
    """Checks a speculative config as the user wrote it.

    Args:
        given: the value of --speculative-config.
        config_class: SpeculativeConfig, whose fields are the keys.

    Raises:
        ValidationError: it is not a mapping, or has an unknown key.
    """
    if not isinstance(given, Mapping):
        raise _invalid(
            f"speculative_config must be a JSON object, not {given!r}: write for "
            f"example {EXAMPLE}.",
            given,
        )
    names, results = {field.name for field in fields(config_class)}, set(RESULTS)
    if given.get("method") == "extract_hidden_states":
        results.remove("draft_model_config")
    known = names - results
    for key, value in given.items():
        if is_dataclass(value):
            continue  # vLLM's, in the arguments of an engine created before
        name = str(key).replace("-", "_")
        if name in results:
            raise _invalid(
                f'"{key}" of speculative_config is not a setting: leave it out.', given
            )
        if name not in known:
            near = get_close_matches(name, known, n=2)
            named = " or ".join(f'"{each}"' for each in near)
            remedy = f"did you mean {named}?" if near else "remove it."
            raise _invalid(f'speculative_config has no key "{key}": {remedy}', given)


def _invalid(words: str, given: Any) -> ValidationError:
    """An error of the type that vLLM raises for an invalid config."""
    error = PydanticCustomError("value_error", "{words}", {"words": words})
    return ValidationError.from_exception_data(
        "SpeculativeConfig", [{"type": error, "input": given}]
    )


def read_name(spec: "SpeculativeConfig") -> None:
    """Replaces a `method` such as "pard" by the method that it means, and sets
    `parallel_drafting`."""
    if spec.method not in NAMES:
        return
    spec.method = NAMES[spec.method]
    if spec.parallel_drafting is None:
        spec.parallel_drafting = True


def check_settings(spec: "SpeculativeConfig") -> None:
    """Checks the settings by themselves.

    Raises:
        ValueError: no drafter is named, or `max_model_len` is above the target's.
    """
    if needs_model(spec) and not (spec.model or "").strip():
        raise ValueError(
            'speculative_config has no "model": name the folder or the hub id of a '
            'drafter, or a "method" that needs none, such as "ngram".'
        )
    if needs_model(spec):
        check_name(spec.model)
    target = spec.target_model_config
    limit = None if target is None else target.max_model_len
    if limit and spec.max_model_len and spec.max_model_len > limit:
        raise ValueError(
            f"max_model_len of speculative_config ({spec.max_model_len}) must be at "
            f"most the target's ({limit}): lower it, or leave it unset."
        )


def fill_settings(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    """Fills in method, parallel drafting and number of tokens where they are unset.

    Raises:
        ValueError: the checkpoint was not trained for what is set, or its number of
            tokens is invalid.
    """
    _fill_method(spec, checkpoint)
    if spec.method in (None, *METHODS):
        _fill_parallel_drafting(spec, checkpoint)
    choose_by_default(spec)
    fill_from_schedule(spec)
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


def _say_if_far_beyond_training(
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
