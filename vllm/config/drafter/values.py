# SPDX-License-Identifier: Apache-2.0
"""Checks single values of a drafter's config.json, as soon as it has been read."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .checkpoint import AGAIN
from .families import TAPPED_LAYERS, listed_layers

# Types of values that are looked into.
KINDS = {
    "architectures": (list, "a list of names"),
    "eagle_config": (dict, "a JSON object"),
    "dflash_config": (dict, "a JSON object"),
}


def check_values(model: str, config: Mapping[str, Any]) -> None:
    """Checks values on which reading the config would fail, or drafts would be garbage.

    Args:
        config: the parsed config.json, with the user's overrides.

    Raises:
        ValueError: one of them is invalid.
    """
    where = f"in {model}/config.json"
    for key in _not_numbers(config):
        raise ValueError(f"{key} {where} is NaN: correct it, or {AGAIN}.")
    for key, (kind, named) in KINDS.items():
        if not isinstance(config.get(key), kind | None):
            raise ValueError(f"{key} {where} must be {named}: correct it, or {AGAIN}.")
    if layers := listed_layers(config):
        check_integers(f"{TAPPED_LAYERS} {where}", layers)
    check_speculators(where, config)


def _not_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose value is NaN, which JSON as Python reads it can hold."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _not_numbers(value))
        elif isinstance(value, float) and math.isnan(value):
            yield key


def check_integers(what: str, value: Any) -> None:
    """Checks that a value is a list of integers.

    Args:
        what: names it, for the error.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return
    raise ValueError(f"{what} must be a list of integers, not {value!r}: correct it.")


def check_finite(what: str, value: Any) -> None:
    """Checks that a value is a number, and not infinite.

    Args:
        what: names it, for the error.

    Raises:
        ValueError: it is not.
    """
    if type(value) in (int, float) and math.isfinite(value):
        return
    raise ValueError(f"{what} must be a finite number, not {value!r}: correct it.")


def check_speculators(where: str, config: Mapping[str, Any]) -> None:
    """Checks the keys that vLLM reads in a checkpoint of the `speculators` library.

    Args:
        where: names the file, for the error.

    Raises:
        ValueError: one of them is missing or not supported.
    """
    kind = config.get("speculators_model_type")
    if kind is None:
        return
    from vllm.transformers_utils.configs.speculators import algos

    if not isinstance(config.get("transformer_layer_config"), Mapping):
        raise ValueError(
            f"transformer_layer_config {where} must be a JSON object: {AGAIN}."
        )
    if kind not in (known := sorted(algos.SUPPORTED_SPECULATORS_TYPES)):
        raise ValueError(
            f"speculators_model_type {where} is {kind!r}, which is not supported: use "
            f"a checkpoint of type {', '.join(known)}."
        )
    if kind == "peagle" and config.get("mask_token_id") is None:
        raise ValueError(
            f"mask_token_id {where} is missing, which P-EAGLE needs: add the id of the "
            "token that it was trained with."
        )
