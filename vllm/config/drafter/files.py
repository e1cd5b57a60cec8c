# SPDX-License-Identifier: Apache-2.0
"""Finds, reads and interprets a drafter's files, and takes from them the settings that
are unset.

`fills_settings` wraps `SpeculativeConfig.__post_init__`.
"""

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import huggingface_hub
import torch
from huggingface_hub import constants, file_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

import vllm.envs as envs
from vllm.engine.config_error import in_one_line
from vllm.logger import init_logger

from . import BLOCK_METHODS, NAMES, OWN_CHECKPOINTS, DraftCheckpoint, find_family
from .length import fill_length, verify_whole_trees

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

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
Override = Callable[[Any], Any]  # changes a config, and returns it
NESTED = "transformer_layer_config"  # of speculators; vLLM flattens it
# Model types that transformers does not know, and the types to read them as.
MODEL_TYPES = {"llama_peagle": "llama"}
CONFIGS = ("config.json", "params.json")
INDEX = "model.safetensors.index.json"
MODEL = '"model" of speculative_config'
# Methods that an explicit setting decides, whatever the path.
HEADS = ("eagle", "eagle3", "dflash", "dspark")
# Words in a path from which vLLM derives the method of a drafter.
WORDS = ("eagle-", "eagle3", "dflash", "dspark")

# With the speculative config: settings that are unset.


def fills_settings(
    post_init: Callable[["SpeculativeConfig"], None],
) -> Callable[["SpeculativeConfig"], None]:
    """Wraps `SpeculativeConfig.__post_init__`, where vLLM reads the draft model's
    config: fills in settings from the checkpoint before it, and names the drafter in
    errors about its config, which read the same as those about the target's."""

    @wraps(post_init)
    def fill(self: "SpeculativeConfig") -> None:
        self.draft_checkpoint = read_files(self)
        try:
            post_init(self)
        except (ValueError, StrictDataclassError) as error:
            has_own = self.method in OWN_CHECKPOINTS + BLOCK_METHODS
            if not has_own or self.draft_model_config is not None:
                raise
            words = in_one_line(error).partition(". ")[0].rstrip(".")
            raise ValueError(
                f"{MODEL}: {self.model}: {words}: correct that in speculative_config "
                "or the drafter's config.json, or name another drafter."
            ) from None
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
    if (checkpoint := find_checkpoint(spec)) is not None:
        _fill_from(spec, checkpoint)
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


def _fill_from(spec: "SpeculativeConfig", checkpoint: DraftCheckpoint) -> None:
    """Fills in method, parallel drafting and K; warns of what contradicts the files."""
    found, family = checkpoint.method, checkpoint.family
    if found is not None and spec.method not in (None, found):
        logger.warning(
            'method "%s" is set, but %s drafts with "%s" (%s), which is used: unset '
            "method.",
            spec.method,
            spec.model,
            found,
            f"family {family.name!r}" if family else "by its tensors",
        )
    spec.method = found or spec.method
    has_choice = spec.method in (None, *OWN_CHECKPOINTS)
    if has_choice and spec.parallel_drafting is None:
        spec.parallel_drafting = checkpoint.is_parallel
    if has_choice and checkpoint.is_parallel and not spec.parallel_drafting:
        logger.warning(
            "%s was trained for parallel drafting, but parallel_drafting=false makes "
            "it draft one token per pass: unset parallel_drafting to use it as meant.",
            spec.model,
        )
    # Checkpoints of PARD and PARD-2 do not say what they were trained for.
    trained = checkpoint.num_speculative_tokens
    fill_length(spec, trained, family and family.num_drafts)
    drafts = spec.num_speculative_tokens
    if drafts is not None and (type(drafts) is not int or drafts < 1):
        raise ValueError(
            f"num_depths or speculative_tokens in {spec.model}/config.json must be a "
            f"positive integer, not {trained!r}: correct it there, or add "
            '"num_speculative_tokens" to the speculative config.'
        )
    if checkpoint.is_parallel and type(trained) is int:
        _fit_length(spec, trained)


def _fit_length(spec: "SpeculativeConfig", trained: int) -> None:
    """Warns if K is above the trained one, and lowers it to the rows of a block."""
    drafts = spec.num_speculative_tokens
    # A block has no rows behind its end that were trained.
    is_block = spec.method in BLOCK_METHODS
    if drafts > trained > 0:
        logger.warning(
            "num_speculative_tokens is %d, but %s was trained to draft %d tokens at "
            "once: those behind them are %s. Lower it, or leave it unset.",
            drafts,
            spec.model,
            trained,
            "not drafted" if is_block else "hardly accepted",
        )
        spec.num_speculative_tokens = trained if is_block else drafts


# A drafter's checkpoint as a whole.


def find_checkpoint(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """How a config's `model` drafts, by its files; None if it has none that say it.

    vLLM then goes by words in its path. Refuses missing files, and those that cannot be
    a drafter's.
    """
    if not needs_model(spec):
        return None
    check_model(spec)
    if (config := load_config(spec)) is None:
        return None
    config = overridden(config, spec.hf_overrides)
    check_values(spec.model, config)
    if known := MODEL_TYPES.get(name := config.get("model_type")):
        from transformers import CONFIG_MAPPING

        CONFIG_MAPPING.register(name, CONFIG_MAPPING[known], exist_ok=True)
    is_folder = (folder := Path(spec.model)).is_dir()
    # A word in its path would make vLLM take a draft model for a head.
    is_misnamed = has_word(spec) and spec.method in (None, "draft_model")
    found = read_checkpoint(
        config,
        partial(_named_tensors, spec),
        os.listdir(folder) if is_folder else (),
        is_unclear=is_misnamed or (spec.method is None and is_folder),
    )
    if found.family is None and found.method == "draft_model" and not is_misnamed:
        return replace(found, method=None)  # vLLM finds out whether it has MTP modules
    return found


def _named_tensors(spec: "SpeculativeConfig") -> list[str]:
    if not (names := tensor_names(spec.model, spec.revision)):
        logger.warning(
            "%s has no tensors whose names could be read to tell how it drafts: unless "
            "its config.json says so, set method and parallel_drafting.",
            spec.model,
        )
    return names


def needs_model(spec: "SpeculativeConfig") -> bool:
    """Whether a config's drafter has files that may tell its method.

    With "mtp", and with "dspark" without a model, it is a part of the target.
    """
    if spec.method in ("dflash", "dspark"):
        return spec.model is not None
    if spec.method is not None:
        return spec.method in OWN_CHECKPOINTS
    is_class = type(spec)._is_custom_proposer_path(spec.model)
    return not is_class and spec.model not in ("ngram", "[ngram]")


def has_word(spec: "SpeculativeConfig") -> bool:
    """Whether the model's path has a word from which vLLM derives a method."""
    return any(word in spec.model.lower() for word in WORDS)


def load_config(spec: "SpeculativeConfig") -> Mapping[str, Any] | None:
    """The parsed config.json; None if it is missing or cannot be read.

    Refuses a local file that holds no JSON object.
    """
    if os.path.isfile(file := os.path.join(spec.model, "config.json")):
        return parse_json(Path(file))
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)[0]
    except (OSError, ValueError):
        return None  # vLLM reports what is wrong with it


# Names of drafters: folders, and models on the hub.


def check_model(spec: "SpeculativeConfig") -> None:
    """Refuses a missing name, a folder that holds no drafter, and one that is not
    there."""
    model, target = spec.model, spec.target_model_config
    if not (model or "").strip():
        raise ValueError(
            'speculative_config has no "model": name the folder or the hub id of a '
            'drafter, or a "method" that needs none, such as "ngram".'
        )
    if names_a_path(model):
        check_folder(spec)
    else:
        is_local = os.path.isdir(getattr(target, "model", None) or "")
        token = getattr(target, "hf_token", None)
        check_exists(MODEL, model, spec.revision, token, is_local)


def names_a_path(model: str) -> bool:
    """Whether a model can only be a local path, or is one that exists."""
    if "://" in model:
        return False
    is_path = model.startswith(("/", "./", "../")) or model.count("/") > 1
    return is_path or os.path.exists(model)


def check_folder(spec: "SpeculativeConfig") -> None:
    """Refuses a local drafter that is no folder with a config, or was made slim."""
    folder, target = Path(spec.model), spec.target_model_config
    if folder.suffix == ".gguf":
        return
    if not os.path.isdir(folder):
        what = "is a file" if os.path.exists(folder) else "does not exist"
        raise ValueError(
            f"{MODEL}: {folder} {what}: name the folder that holds the drafter's "
            "config.json and weights."
        )
    if (folder / "slim.json").is_file():
        raise ValueError(
            f"{MODEL}: {folder} lacks what is the target's: name the folder that "
            f"`python -m tools.real_model fill {folder} --out FOLDER` writes."
        )
    is_custom = target and target.config_format not in ("auto", "hf", "mistral")
    if is_custom or any((folder / name).is_file() for name in CONFIGS):
        return
    inside = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    such = f", such as {' or '.join(inside[:5])}" if inside else ""
    raise ValueError(
        f"{MODEL}: {folder} has no config.json: name a drafter's folder{such}, or "
        f"{AGAIN}."
    )


def check_exists(
    what: str, model: str, revision: str | None, token: Any, is_local: bool = False
) -> None:
    """Refuses the name of a model, called `what`, that is missing, see `is_missing`."""
    if is_missing(model, revision, token, is_local):
        folder = Path(model)
        others = os.listdir(folder.parent) if folder.parent.is_dir() else []
        near = get_close_matches(folder.name, others, n=1)
        proposed = f', such as "{folder.parent / near[0]}"' if near else ""
        raise ValueError(
            f"{what}: {model} does not exist, nor was it found on the hub: name the "
            f"folder that holds config.json and weights{proposed}."
        )


def is_missing(model: str, revision: str | None, token: Any, is_local: bool) -> bool:
    """Whether a name may be that of a missing folder, and is not on the hub either.

    It may be if its parent folder exists, or `is_local`: the model beside it is local.
    The hub is asked once; if it did not answer, vLLM and transformers would retry for
    minutes.
    """
    if os.path.exists(model):
        return False
    if names_a_path(model):
        return True
    cached = os.path.join(constants.HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    may_be_a_path = (
        (is_local or ("/" in model and Path(model).parent.is_dir()))
        and ":" not in model  # a URL, or a file of a repository
        and not os.path.isdir(cached)
        and not envs.VLLM_USE_MODELSCOPE
    )
    return may_be_a_path and not _is_on_hub(model, revision, token)


def _is_on_hub(model: str, revision: str | None, token: Any) -> bool:
    try:
        url = hf_hub_url(model, "config.json", revision=revision)
        file_download.get_hf_file_metadata(url, token=token)
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        return True
    except HfHubHTTPError as error:
        # With any other status the repository exists, and vLLM may be able to read it.
        return not isinstance(error, RepositoryNotFoundError)
    except Exception:  # no name, or no answer: its type depends on the HTTP library
        return False
    return True


def find_file(model: str, name: str, revision: str | None) -> Path | None:
    """A file of a checkpoint, local, cached or on the hub; None if it has none."""
    if (folder := Path(model)).exists():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(huggingface_hub.hf_hub_download(model, name, revision=revision))
    except (OSError, ValueError):
        return None


def serve_head(
    head: str, config: Mapping[str, Any], spec: Any, token: Any
) -> tuple[str, str, Any]:
    """`vllm serve` with a speculators head in the place of a model.

    Args:
        head: folder or hub id of the head; `config` is its config.json.
        spec: the user's speculative config; None if there is none.
        token: for the hub.

    Returns:
        The target that the head names, its tokenizer, and the user's speculative config
        with the head as `model`, so that nothing in the head's file counts as set by
        the user. A head that names no model on the hub is refused: as in vLLM, no file
        chooses a folder of this machine.
    """
    settings = config["speculators_config"]
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not _is_hub_id(name, token, Path(head).is_dir()):
        raise ValueError(
            f"verifier.name_or_path of speculators_config in {head}/config.json is "
            f"{name!r}, which is no model on the hub: name the target, as in vllm "
            f'serve TARGET --speculative-config \'{{"model": "{head}"}}\'.'
        )
    if spec is None or isinstance(spec, Mapping):
        spec = {**(spec or {}), "model": head}
    return name, name, spec


def _is_hub_id(name: Any, token: Any, is_local: bool) -> bool:
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return False
    is_path = Path(name).exists() or Path(name).is_symlink()
    return not is_path and not is_missing(name, None, token, is_local)


# What config.json says.


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
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """A parsed config.json with the user's overrides."""
    if not overrides:
        return config
    made = {**config, **overrides}
    if NESTED in overrides:
        if not isinstance(overrides[NESTED], Mapping):
            raise ValueError(f"{NESTED} in hf_overrides must be keys and values.")
        made[NESTED] = {**(config.get(NESTED) or {}), **overrides[NESTED]}
    return made


def overrides_of(spec: "SpeculativeConfig", of_vllm: Override) -> Override:
    """The `hf_overrides` for a drafter's config: the user's, and then vLLM's.

    vLLM's turn every model that may have an MTP module, such as Qwen3.5 or DeepSeek-V3,
    into that module; a draft model is the model itself.
    """
    if spec.method == "draft_model":
        of_vllm = partial(_adapt, spec.target_model_config.hf_overrides)
    if not spec.hf_overrides:
        return of_vllm
    return partial(_override, spec.hf_overrides, of_vllm)


def _adapt(of_target: Override | Mapping[str, Any], config: Any) -> Any:
    config = adapt_config(config)
    return of_target(config) if callable(of_target) else config


def _override(of_user: Mapping[str, Any], of_vllm: Override, config: Any) -> Any:
    """As for a target: values by key, or keys of a nested config."""
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
    """Refuses values of a config.json, with the user's overrides, that cannot be
    read."""
    where = f"in {model}/config.json"
    for key, (kind, named) in KINDS.items():
        if not isinstance(config.get(key), kind | None):
            raise ValueError(f"{key} {where} must be {named}: correct it, or {AGAIN}.")
    if layers := listed_layers(config):
        check_integers(f"{TAPPED_LAYERS} {where}", layers)
    _check_speculators(where, config)


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


# Single files.


def parse_json(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file, such as config.json; refuses what is no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): {AGAIN}.") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} must hold a JSON object: {AGAIN}.")
    return content


@dataclass(frozen=True)
class Tensor:
    """One tensor, as its file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_header(file: Path) -> Iterator[Tensor]:
    """The tensors of a safetensors file; refuses a broken file."""
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                part = opened.get_slice(name)
                yield Tensor(name, file, part.get_dtype(), tuple(part.get_shape()))
    except SafetensorError as error:
        raise ValueError(
            f"{file} is cut short, or is no safetensors file ({error}): {AGAIN}."
        ) from None


def read_headers(folder: Path) -> dict[str, Tensor]:
    """The safetensors tensors that would be loaded from a folder, by name; refuses
    broken files, and an index that names other files than those of its folder."""
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    if (index := folder / INDEX).is_file():
        try:
            names = {*parse_json(index)["weight_map"].values()}
        except (LookupError, TypeError, AttributeError):
            raise ValueError(f"{index} is not a safetensors index: {AGAIN}.") from None
        if lacks := names - files.keys():
            raise ValueError(
                f"{INDEX} of {folder} names {', '.join(map(repr, lacks))}, which is "
                f"missing there: {AGAIN}."
            )
        files = {name: files[name] for name in sorted(names)}
    return {each.name: each for file in files.values() for each in read_header(file)}


def find_tensors(model: str, revision: str | None) -> dict[str, Tensor]:
    """Safetensors tensors of a checkpoint, local, cached or on the hub, by name.

    Empty if their headers cannot be read: whatever loads the files reports that.
    """
    if not (folder := Path(model)).is_dir():
        return _hub_tensors(model, revision)
    try:
        return read_headers(folder)
    except ValueError:
        return {}


@lru_cache(maxsize=1)
def _hub_tensors(model: str, revision: str | None) -> dict[str, Tensor]:
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    found = get_safetensors_params_metadata(model, revision=revision)
    return {
        name: Tensor(name, Path(model), each["dtype"], tuple(each["shape"]))
        for name, each in found.items()
    }


def tensor_names(model: str, revision: str | None) -> list[str]:
    """Names of a checkpoint's tensors; empty if none can be read.

    Of files of torch.save, which are read only in a folder, no code is run.
    """
    names = list(find_tensors(model, revision))
    for file in [] if names else Path(model).glob("*.bin"):
        with suppress(UnpicklingError, RuntimeError, EOFError, ValueError, OSError):
            found = torch.load(file, map_location="meta", mmap=True, weights_only=True)
            names += found if isinstance(found, Mapping) else ()
    return names
