# SPDX-License-Identifier: Apache-2.0
"""Fills and checks a SpeculativeConfig by what its checkpoint says of itself."""

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.config.draft_checks import check_drafter
from vllm.config.draft_families import (
    DraftFamily,
    default_layers,
    takes_aux_hidden_states,
    tapped_layers,
)
from vllm.config.draft_features import settle_target_features
from vllm.config.draft_headers import read_config, read_headers
from vllm.config.draft_length import verify_draft_length
from vllm.config.draft_vocab import match_vocabularies
from vllm.config.drafting import (
    METHODS,
    DraftCheckpoint,
    get_mask_token_id,
    read_checkpoint,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Model types that transformers does not know, and those that it is to read them as.
MODEL_TYPES = {"llama_peagle": "llama"}
ONE_LAYER = "EAGLE-3, SafeAILab"  # a family whose heads have no other layer


def fill_from_checkpoint(spec: "SpeculativeConfig") -> None:
    """Sets what is unset of method, parallel drafting and number of tokens.

    Raises:
        ValueError: a setting contradicts the checkpoint, the checkpoint is of a kind
            that is not supported, or nothing says how many tokens to draft.
    """
    checkpoint = _read(spec)
    if checkpoint is None:
        spec.parallel_drafting = bool(spec.parallel_drafting)
        return
    family = checkpoint.family
    if family is not None:
        _refuse_contradictions(spec, family)
        spec.method, spec.draft_family = family.method, family.name
    # The base would go by words like "eagle-" in the path.
    spec.known_method = spec.method
    _fill_parallel_drafting(spec, checkpoint)
    _fill_num_drafts(spec, checkpoint)


def _refuse_contradictions(spec: "SpeculativeConfig", family: DraftFamily) -> None:
    if spec.method not in (None, family.method):
        raise ValueError(
            f'method is "{spec.method}", but {spec.model} is a checkpoint of '
            f"{family.name} ({family.told_by}), which drafts with "
            f'"{family.method}": unset method.'
        )


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


def _fill_num_drafts(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    if spec.num_speculative_tokens is not None:
        return
    family = checkpoint.family
    spec.num_speculative_tokens = checkpoint.num_speculative_tokens
    if spec.num_speculative_tokens is None and family is not None:
        spec.num_speculative_tokens = family.num_drafts
    if spec.num_speculative_tokens is None and spec.method in METHODS:
        raise ValueError(
            f"{spec.model} does not say how many tokens it was trained to draft: add "
            '"num_speculative_tokens" to the speculative config, for example 7.'
        )


def _read(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """What the checkpoint says; None where it is not one that we draft with."""
    if spec.model is None or spec.method not in (None, *METHODS):
        return None
    if spec.method is None and spec.model in ("ngram", "[ngram]"):
        return None
    from transformers import CONFIG_MAPPING, PretrainedConfig

    folder = Path(spec.model)
    try:
        if (file := folder / "config.json").is_file():
            config = read_config(file)
        else:
            revision = spec.revision
            config, _ = PretrainedConfig.get_config_dict(spec.model, revision=revision)
    except (OSError, ValueError):
        return None  # no readable config.json: the base says what is wrong with it
    if known := MODEL_TYPES.get(name := config.get("model_type")):
        CONFIG_MAPPING.register(name, CONFIG_MAPPING[known], exist_ok=True)
    files = os.listdir(folder) if folder.is_dir() else ()
    return read_checkpoint(config, partial(_tensor_names, spec), files)


def _tensor_names(spec: "SpeculativeConfig") -> list[str]:
    """Names of a checkpoint's tensors, local, cached or on the hub, by headers alone.

    None are found in a checkpoint without safetensors; one log line says so.
    """
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    model, revision = spec.model, spec.revision
    if (folder := Path(model)).is_dir():
        names = list(read_headers(folder))
    else:
        names = list(get_safetensors_params_metadata(model, revision=revision))
    if not names and spec.parallel_drafting is None:
        logger.warning(
            "%s names a mask token, but has no safetensors headers to tell whether it "
            "was trained for parallel drafting: it drafts one token per pass unless "
            "parallel_drafting=true is set.",
            spec.model,
        )
    return names


def log_drafter(spec: "SpeculativeConfig") -> None:
    if spec.method in METHODS and spec.draft_model_config is not None:
        logger.info("%s", describe_drafter(spec))


def describe_drafter(spec: "SpeculativeConfig") -> str:
    """One line on what was made of a checkpoint."""
    config = spec.draft_model_config.hf_config
    mask = get_mask_token_id(config) if spec.parallel_drafting else None
    family = getattr(spec, "draft_family", None) or "unknown"
    return (
        f"Drafter {spec.model}: family {family!r}, method {spec.method}, "
        f"{spec.num_speculative_tokens} tokens a step, {spec.drafting_width} a pass, "
        f"mask token {mask}, fed by {_fed_by(spec)}."
    )


def _fed_by(spec: "SpeculativeConfig") -> str:
    if spec.target_features is not None:
        return f"layers {spec.target_features.layers}"
    if spec.method == "draft_model":
        return "tokens alone"
    config = spec.draft_model_config.hf_config
    if spec.method == "eagle" or not takes_aux_hidden_states(config):
        return "the last layer"
    if named := tapped_layers(config):
        return f"layers {named}"
    depth = spec.target_model_config.get_total_num_hidden_layers()
    return f"layers {default_layers(depth)}, the target's defaults"


def settle_drafting(spec: "SpeculativeConfig") -> None:
    """What is left to do once the base has read the draft model's config."""
    check_drafter(spec)
    settle_layers(spec)
    settle_target_features(spec)
    match_vocabularies(spec)
    verify_drafting(spec)
    verify_draft_length(spec)
    log_drafter(spec)


def settle_layers(spec: "SpeculativeConfig") -> None:
    """Corrects `num_hidden_layers` of heads that count the target's layers.

    SafeAILab's code builds one layer without looking at it. Their heads for Vicuna say
    40.
    """
    draft = spec.draft_model_config
    if draft is None or getattr(spec, "draft_family", None) != ONE_LAYER:
        return
    named, folder = draft.hf_config.num_hidden_layers, Path(spec.model)
    tensors = read_headers(folder) if folder.is_dir() else ()
    if named == 1 or any(re.search(r"\blayers\.[1-9]", name) for name in tensors):
        return
    logger.info(
        "%s names %d layers; a head of its kind has one, whatever it says.",
        spec.model,
        named,
    )
    draft.hf_config.num_hidden_layers = draft.hf_text_config.num_hidden_layers = 1
    draft.model_arch_config = draft.get_model_arch_config()


def verify_drafting(spec: "SpeculativeConfig") -> None:
    """Checks what only the finished config can tell.

    Raises:
        ValueError: the drafting settings contradict each other.
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
    if spec.parallel_drafting and spec.method == "eagle":
        raise ValueError(
            "parallel_drafting needs a drafter with a learned mask_hidden, which "
            'method "eagle" has not: use an EAGLE-3 style checkpoint (P-EAGLE) with '
            'method "eagle3".'
        )
    if spec.parallel_drafting and spec.method in METHODS:
        mask = get_mask_token_id(spec.draft_model_config.hf_config)
        vocab = spec.draft_model_config.get_vocab_size()
        if mask is None or not 0 <= mask < vocab:
            raise ValueError(
                f"parallel_drafting needs a mask token of the draft model's {vocab} "
                f"tokens, but its config names {mask}: correct mask_token_id, "
                "pard_token or ptd_token_id in config.json, or unset "
                "parallel_drafting."
            )
    target = spec.target_parallel_config
    if spec.method == "draft_model" and target is not None:
        ours, theirs = spec.draft_tensor_parallel_size, target.tensor_parallel_size
        if ours != theirs:
            raise ValueError(
                f"draft_tensor_parallel_size ({ours}) must equal the target's "
                f"tensor_parallel_size ({theirs}) for a draft model: leave it unset."
            )
