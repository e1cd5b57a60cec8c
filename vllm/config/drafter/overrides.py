# SPDX-License-Identifier: Apache-2.0
"""Keys of a drafter's config that the user, or vLLM, overrides."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from .families import adapt_config

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

Overrides = Callable[[Any], Any] | Mapping[str, Any]
NESTED = "transformer_layer_config"  # of speculators; vLLM flattens it


def overridden(
    config: Mapping[str, Any], overrides: Overrides | None
) -> Mapping[str, Any]:
    """A parsed config.json with the user's overrides.

    Functions are left out: they change the config class, which is made later.
    """
    if not overrides or callable(overrides):
        return config
    made = {**config, **overrides}
    if NESTED in overrides:
        if not isinstance(overrides[NESTED], Mapping):
            raise ValueError(f"{NESTED} in hf_overrides must be keys and values.")
        made[NESTED] = {**(config.get(NESTED) or {}), **overrides[NESTED]}
    return made


def overrides_of(spec: "SpeculativeConfig", of_vllm: Overrides) -> Overrides:
    """The `hf_overrides` for a drafter's config: the user's, and then vLLM's own.

    vLLM's own turn every model that may have an MTP module, such as Qwen3.5 or
    DeepSeek-V3, into that module; a draft model is the model itself.

    Args:
        of_vllm: vLLM's own.
    """
    if spec.method == "draft_model":
        of_vllm = partial(_adapt, spec.target_model_config.hf_overrides)
    if not spec.hf_overrides:
        return of_vllm
    return partial(_override, spec.hf_overrides, of_vllm)


def _adapt(of_target: Overrides, config: Any) -> Any:
    config = adapt_config(config)
    return of_target(config) if callable(of_target) else config


def _override(of_user: Overrides, of_vllm: Overrides, config: Any) -> Any:
    """As for a target: a function, or keys and values.

    A mapping replaces the value, or keys of a nested config.
    """
    if callable(of_user):
        return of_vllm(of_user(config))
    rope = getattr(config, "rope_parameters", None) or {}
    flat = {**of_user, **of_user.get(NESTED, {})}
    flat.pop(NESTED, None)
    for key, value in flat.items():
        nested = getattr(config, key, None)
        if isinstance(nested, PreTrainedConfig) and isinstance(value, Mapping):
            nested.update(value)
        elif key in rope:  # moved there from the top level, where vLLM ignores it
            rope[key] = value
        else:
            config.update({key: value})
    return of_vllm(config)
