# SPDX-License-Identifier: Apache-2.0
"""Interprets a drafter's config.json, by the families of published drafters.

`docs/checkpoints.md` shows the table of families.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from . import BLOCK_METHODS

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

AGAIN = "download or export the checkpoint again"

# Architectures that vLLM has under another name. The last two are NeMo's.
ARCHITECTURES = {
    "LlamaEagle3DraftModel": "LlamaForCausalLMEagle3",
    "PEagleDraftModel": "LlamaForCausalLMEagle3",
    "LlamaForCausalLMPeagle": "LlamaForCausalLMEagle3",
    "Qwen3DFlashDraftModel": "DFlashDraftModel",
    "Qwen3DFlash2DraftModel": "DFlash2DraftModel",
}
EAGLE3_LAYER = r"midlayer\.|layers\.0\.hidden_norm\."
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
TAPPED_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Types of values that are looked into.
KINDS = {
    "architectures": (list, "a list of names"),
    "eagle_config": (dict, "a JSON object"),
    "dflash_config": (dict, "a JSON object"),
}
SET = r"(?!(False|None|\{\})$).*"  # a value that counts as set
Overrides = Callable[[Any], Any] | Mapping[str, Any]
NESTED = "transformer_layer_config"  # of speculators; vLLM flattens it


@dataclass(frozen=True)
class DraftFamily:
    """Drafters that are published in one format.

    Attributes:
        name: in logs and docs.
        method: of the speculative config.
        is_parallel: whether it drafts several tokens per pass.
        num_drafts: K if neither the user nor the checkpoint gives it: what its authors
            train or evaluate it with. None: vLLM has a default, or asks the user.
        signs: by which it is told, joined by " or " and " with ": a config key that is
            set, or `key=pattern`, which its value or an item of it matches. The key
            "tensor" stands for the last part of the tensors' names, and "file" for the
            files of a local folder.
    """

    name: str
    method: str
    is_parallel: bool
    num_drafts: int | None
    signs: str


# The first one that matches is used. The first three have vLLM's own speculators; some
# of their configs have keys of other families, too. DeepSeek's DSpark heads have the
# architecture of their target, and Muse Spark's have none.
FAMILIES = (
    DraftFamily(
        "DSpark",
        "dspark",
        True,
        None,
        "architectures=.*DSpark.* or model_type=(?i).*dspark.* or "
        "dspark_noise_token_id or speculators_model_type=dspark",
    ),
    DraftFamily(
        "DFlash",
        "dflash",
        True,
        None,
        "dflash_config or speculators_model_type=dflash|dflash2 or "
        "architectures=.*(DFlash|LiLiCorr|XPress|MuseGlimmerAssistant).*",
    ),
    DraftFamily("MTP", "mtp", False, None, "architectures=.*MTP.*"),
    DraftFamily(
        "PARD-2",
        "draft_model",
        True,
        15,
        "spd_type=pard2 or pard2 or pard2_target_dim=[1-9].* or pard2_target_layers or "
        "file=warp_model.bin",
    ),
    DraftFamily(
        "P-EAGLE, speculators", "eagle3", True, 7, "speculators_model_type=peagle"
    ),
    DraftFamily(
        "EAGLE-3, speculators", "eagle3", False, 3, "speculators_model_type=eagle3"
    ),
    DraftFamily("PARD", "draft_model", True, 8, "pard_token"),
    DraftFamily("P-EAGLE, Amazon", "eagle3", True, 7, "ptd_token_id"),
    DraftFamily(
        "P-EAGLE, NeMo",
        "eagle3",
        True,
        7,
        "parallel_drafting=True|1 with mask_token_id",
    ),
    DraftFamily(
        "P-EAGLE, SpecForge or verl-SpeCo",
        "eagle3",
        True,
        7,
        "architectures=PEagleDraftModel|LlamaForCausalLMPeagle or "
        "mask_token_id with tensor=mask_hidden",
    ),
    DraftFamily(
        "EAGLE-3, SpecForge or NVIDIA",
        "eagle3",
        False,
        3,
        "eagle_config or architectures=.*Eagle3.*",
    ),
    DraftFamily("EAGLE-3, SafeAILab", "eagle3", False, 3, "draft_vocab_size"),
)


def find_family(
    config: Mapping[str, Any],
    tensor_names: Callable[[], Collection[str]] = list,
    file_names: Collection[str] = (),
) -> DraftFamily | None:
    """The family of a checkpoint; None for a language model.

    Args:
        config: the parsed config.json.
        tensor_names: its tensors' names, read only when called.
        file_names: names of files beside config.json, if it is a local folder.
    """

    def shows(sign: str) -> bool:
        key, _, pattern = sign.partition("=")
        if key == "tensor":
            values = [name.rpartition(".")[2] for name in tensor_names()]
        elif key == "file":
            values = [*file_names]
        else:
            value = config.get(key)
            values = value if isinstance(value, list) else [value]
        return any(re.fullmatch(pattern or SET, str(each)) for each in values)

    for family in FAMILIES:
        for signs in family.signs.split(" or "):
            if all(map(shows, signs.split(" with "))):
                return family
    return None


def method_of_tensors(tensor_names: Collection[str]) -> str | None:
    """The method of a checkpoint of no family, by its tensors' names; None: unclear.

    Heads of the first EAGLE have a language model's config, and a layer `fc` in front.
    EAGLE-3 heads normalize the target's hidden states in their first layer, DFlash and
    DSpark before it.
    """
    names = [name.removeprefix("model.") for name in tensor_names]
    if any(name.startswith("markov_head.") for name in names):
        return "dspark"
    if "hidden_norm.weight" in names:
        return "dflash"
    if "fc.weight" in names:
        is_eagle3 = any(re.match(EAGLE3_LAYER, name) for name in names)
        return "eagle3" if is_eagle3 else "eagle"
    is_language_model = any(name.endswith(EMBEDDINGS) for name in names)
    return "draft_model" if is_language_model else None


@dataclass(frozen=True)
class DraftCheckpoint:
    """How a checkpoint was trained to draft.

    Attributes:
        family: None for a language model.
        method: None if neither config nor tensors say it.
        num_speculative_tokens: draft tokens that it was trained for, as in its config,
            valid or not; None if it does not say.
    """

    family: DraftFamily | None
    method: str | None
    num_speculative_tokens: Any = None

    @property
    def is_parallel(self) -> bool:
        """Whether it was trained to draft several tokens per pass."""
        return self.family is not None and self.family.is_parallel


def first_set(config: Any, *keys: str, default: Any = None) -> Any:
    """The first value that is set of some keys of a config, a mapping or an object."""
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    values = (get(key, None) for key in keys)
    return next((value for value in values if value is not None), default)


def read_checkpoint(
    config: Mapping[str, Any],
    tensor_names: Callable[[], Collection[str]] = list,
    file_names: Collection[str] = (),
    is_unclear: bool = False,
) -> DraftCheckpoint:
    """How a checkpoint was trained to draft, by the arguments of `find_family`.

    Args:
        is_unclear: whether its tensors have to tell a language model from a head.
    """
    family = find_family(config, tensor_names, file_names)
    method = family.method if family else None
    if family is None and is_unclear:
        method = method_of_tensors(tensor_names())
    depth = _trained_depth(config)
    if method in BLOCK_METHODS and (most := _block_depth(config, method)):
        depth = min(depth, most) if type(depth) is int else depth or most
    return DraftCheckpoint(family, method, depth)


def _trained_depth(config: Mapping[str, Any]) -> Any:
    settings = config.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else 0
    first = methods[0] if isinstance(methods, list) and methods else {}
    depth = first.get("speculative_tokens") if isinstance(first, Mapping) else first
    return config.get("num_depths") if depth is None else depth


def _block_depth(config: Mapping[str, Any], method: str) -> int | None:
    """Drafts in a block; None if its size is unknown.

    The first row is a known token's. With DFlash, a row predicts the token at its own
    place; with DSpark the next one, except where `sample_from_anchor` is false.
    """
    nested = config.get("dflash_config") or {}
    keys = "xpress_block_size", "block_size", "dspark_block_size"
    sizes = (each.get(key) for key in keys for each in (nested, config))
    size = next(filter(None, sizes), None)
    if type(size) is not int or size < 2:
        return None
    usual = method == "dspark" and "speculators_model_type" not in config
    is_first = {**nested, **config}.get("sample_from_anchor", usual)
    return size if is_first else size - 1


def tapped_layers(config: Any) -> tuple[int, ...] | None:
    """Ids of the target's layers whose inputs a head is fed; None: vLLM's defaults."""
    ids = listed_layers(config)
    return tuple(ids) if ids else None


def listed_layers(config: Any) -> Any:
    """The value of `tapped_layers` as it is in a config, a mapping or an object, valid
    or not: at top level or in `eagle_config`."""
    nested = first_set(config, "eagle_config", default={})
    return first_set(config, TAPPED_LAYERS) or first_set(
        nested, TAPPED_LAYERS, "layer_ids"
    )


def default_layers(depth: int) -> tuple[int, ...]:
    """Layers that vLLM taps in a target of `depth` layers if the head names none."""
    return 2, depth // 2, depth - 3


def takes_aux_hidden_states(config: Any) -> bool:
    """Whether an EAGLE-3 head is fed states of several layers, not the last's."""
    nested = first_set(config, "eagle_config", default={})
    return nested.get("use_aux_hidden_state", True)


def adapt_config(config: Any) -> Any:
    """Copies values of a draft model's config to where vLLM looks for them, and returns
    it, a Hugging Face config."""
    names = getattr(config, "architectures", None) or ()
    if any(name in ARCHITECTURES for name in names):
        config.architectures = [ARCHITECTURES.get(name, name) for name in names]
    if any("DSpark" in name for name in names):
        # SpecForge nests what vLLM reads at the top level.
        for key, value in (getattr(config, "dflash_config", None) or {}).items():
            if getattr(config, key, None) is None:
                setattr(config, key, value)
    ids = tapped_layers(config)
    # vLLM's Llama heads count only ids in `eagle_config`, and otherwise assume three.
    if ids and getattr(config, "num_aux_hidden_states", None) is None:
        config.num_aux_hidden_states = len(ids)
    return config


# Overrides of keys, by the user and by vLLM.


def overridden(
    config: Mapping[str, Any], overrides: Overrides | None
) -> Mapping[str, Any]:
    """A parsed config.json with the user's overrides, except functions, which change
    the config class that is made later."""
    if not overrides or callable(overrides):
        return config
    made = {**config, **overrides}
    if NESTED in overrides:
        if not isinstance(overrides[NESTED], Mapping):
            raise ValueError(f"{NESTED} in hf_overrides must be keys and values.")
        made[NESTED] = {**(config.get(NESTED) or {}), **overrides[NESTED]}
    return made


def overrides_of(spec: "SpeculativeConfig", of_vllm: Overrides) -> Overrides:
    """The `hf_overrides` for a drafter's config: the user's, and then vLLM's.

    vLLM's turn every model that may have an MTP module, such as Qwen3.5 or DeepSeek-V3,
    into that module; a draft model is the model itself.
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
    """As for a target: a function, or values by key, or keys of a nested config."""
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


# Checks of single values, as soon as config.json has been read.


def check_values(model: str, config: Mapping[str, Any]) -> None:
    """Refuses values of a config.json, with the user's overrides, that cannot be read,
    or that make drafts garbage."""
    where = f"in {model}/config.json"
    for key in _not_numbers(config):
        raise ValueError(f"{key} {where} is NaN: correct it, or {AGAIN}.")
    for key, (kind, named) in KINDS.items():
        if not isinstance(config.get(key), kind | None):
            raise ValueError(f"{key} {where} must be {named}: correct it, or {AGAIN}.")
    if layers := listed_layers(config):
        check_integers(f"{TAPPED_LAYERS} {where}", layers)
    _check_speculators(where, config)


def _not_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose value is NaN, which JSON as Python reads it can hold."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in _not_numbers(value))
        elif isinstance(value, float) and math.isnan(value):
            yield key


def check_integers(what: str, value: Any) -> None:
    """Refuses a value, named by `what`, that is no list of integers."""
    is_list = isinstance(value, list | tuple)
    if not is_list or any(type(each) is not int for each in value):
        raise ValueError(
            f"{what} must be a list of integers, not {value!r}: correct it."
        )


def check_finite(what: str, value: Any) -> None:
    """Refuses a value, named by `what`, that is no finite number."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, not {value!r}: correct it.")


def _check_speculators(where: str, config: Mapping[str, Any]) -> None:
    """Checks the keys that vLLM reads in a checkpoint of the `speculators` library."""
    kind = config.get("speculators_model_type")
    if kind is None:
        return
    from vllm.transformers_utils.configs.speculators import algos

    if not isinstance(config.get(NESTED), Mapping):
        raise ValueError(f"{NESTED} {where} must be a JSON object: {AGAIN}.")
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
