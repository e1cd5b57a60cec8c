# SPDX-License-Identifier: Apache-2.0
"""What a draft checkpoint says of itself: how it was trained to draft."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from .drafter import METHODS
from .families import DraftFamily, DraftFiles, find_family, told_by_tensors
from .files import AGAIN, read_config, tensor_names

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Where checkpoints keep the id of the token that stands for "to be drafted":
# speculators and NeMo, PARD, P-EAGLE of Amazon. The first one found counts.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
# Model types that transformers does not know, and those that it is to read them as.
MODEL_TYPES = {"llama_peagle": "llama"}


@dataclass(frozen=True)
class DraftCheckpoint:
    """How a checkpoint was trained to draft.

    Attributes:
        family: which drafters it is published like; None for a language model.
        method: that it drafts with; None if neither config nor tensors tell.
        mask_token_id: of the slots to be drafted, as its config has it, a token id
            or not; None if the config names none.
        num_speculative_tokens: drafts it was trained for, as its config has it, a
            number or not; None if it does not say.
    """

    family: DraftFamily | None
    method: str | None
    mask_token_id: Any
    num_speculative_tokens: Any

    @property
    def is_parallel(self) -> bool:
        """Whether it was trained to draft several tokens per pass."""
        return self.family is not None and self.family.is_parallel


def get_mask_token_id(config: Any) -> Any:
    """What a draft model's config, a mapping or an object, names as mask token id."""
    get = config.get if isinstance(config, Mapping) else partial(getattr, config)
    values = (get(key, None) for key in MASK_TOKEN_KEYS)
    return next((value for value in values if value is not None), None)


def read_checkpoint(
    config: Mapping[str, Any],
    tensor_names: Callable[[], Collection[str]] = list,
    file_names: Collection[str] = (),
    is_unclear: bool = False,
) -> DraftCheckpoint:
    """Reads a draft model's raw config, as in its config.json.

    Args:
        config: the parsed config.json.
        tensor_names: names of the checkpoint's tensors, asked for only where the
            config leaves open what it drafts with.
        file_names: of the files beside config.json, as far as they are known.
        is_unclear: whether its tensors have to tell a language model from a head.
    """
    files = DraftFiles(config, tensor_names, file_names)
    family = find_family(files)
    method = family.method if family else None
    if family is None and is_unclear:
        method = told_by_tensors(files)
    depth = _trained_depth(config)
    return DraftCheckpoint(family, method, get_mask_token_id(config), depth)


def _trained_depth(config: Mapping[str, Any]) -> Any:
    settings = config.get("speculators_config")
    methods = settings.get("proposal_methods") if isinstance(settings, Mapping) else 0
    first = methods[0] if isinstance(methods, list) and methods else {}
    depth = first.get("speculative_tokens") if isinstance(first, Mapping) else first
    return config.get("num_depths") if depth is None else depth


def find_checkpoint(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """What the files of a config's `model` say; None if it is none of ours to read.

    Raises:
        ValueError: they cannot be a drafter's.
    """
    if not needs_model(spec):
        return None
    is_local = _names_a_path(spec.model)
    if is_local:
        check_folder(spec)
    config = _load_config(spec)
    if config is None:
        return None
    check_speculators(spec.model, config)
    if known := MODEL_TYPES.get(name := config.get("model_type")):
        from transformers import CONFIG_MAPPING

        CONFIG_MAPPING.register(name, CONFIG_MAPPING[known], exist_ok=True)
    folder, is_misnamed = Path(spec.model), _is_misnamed(spec)
    is_folder = folder.is_dir()
    found = read_checkpoint(
        config,
        partial(_tensor_names, spec),
        os.listdir(folder) if is_folder else (),
        is_unclear=is_misnamed or (spec.method is None and is_folder),
    )
    if found.family is None and found.method == "draft_model" and not is_misnamed:
        return replace(found, method=None)  # vLLM tells whether it has MTP modules
    return found


def needs_model(spec: "SpeculativeConfig") -> bool:
    """Whether a config drafts, or may, with a method of the unified speculator."""
    if spec.method is not None:
        return spec.method in METHODS
    is_class = type(spec)._is_custom_proposer_path(spec.model)
    return not is_class and spec.model not in ("ngram", "[ngram]")


def _is_misnamed(spec: "SpeculativeConfig") -> bool:
    """Whether vLLM would take a draft model for a head, by a word in its path."""
    name = spec.model.lower()
    has_word = "eagle-" in name or "eagle3" in name
    return has_word and spec.method in (None, "draft_model")


def _names_a_path(model: str) -> bool:
    """Whether a model can only be a local path, or is one that exists."""
    if "://" in model:
        return False
    is_path = model.startswith(("/", "./", "../")) or model.count("/") > 1
    return is_path or Path(model).exists()


def _load_config(spec: "SpeculativeConfig") -> Mapping[str, Any] | None:
    """The parsed config.json; None if there is none to be read."""
    if (file := Path(spec.model) / "config.json").is_file():
        return read_config(file)
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)[0]
    except (OSError, ValueError):
        return None  # vLLM says what is wrong with it


def _tensor_names(spec: "SpeculativeConfig") -> list[str]:
    """Names of a checkpoint's tensors, local, cached or on the hub.

    None are found in a checkpoint on the hub without safetensors.
    """
    if (folder := Path(spec.model)).is_dir():
        names = tensor_names(folder)
    else:
        from vllm.transformers_utils.config import get_safetensors_params_metadata

        found = get_safetensors_params_metadata(spec.model, revision=spec.revision)
        names = list(found)
    if not names:
        logger.warning(
            "%s has no tensors whose names could be read to tell how it drafts: unless "
            "its config.json says so, set method and parallel_drafting.",
            spec.model,
        )
    return names


def check_folder(spec: "SpeculativeConfig") -> None:
    """Checks that a local drafter is a folder with a config.

    Raises:
        ValueError: it is not.
    """
    folder = Path(spec.model)
    if folder.suffix == ".gguf":
        return
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f'"model" of speculative_config: {folder} {what}: name the folder that '
            "holds the drafter's config.json and weights."
        )
    target = spec.target_model_config
    known = ("auto", "hf", "mistral")
    if target is not None and target.config_format not in known:
        return
    if (folder / "config.json").is_file() or (folder / "params.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f'"model" of speculative_config: {folder} is a LoRA adapter, which cannot '
            "draft: merge it into its base model, and name the merged model."
        )
    raise ValueError(
        f'"model" of speculative_config: {folder} has no config.json: name a '
        f"drafter's folder, or {AGAIN}."
    )


def check_speculators(model: str, config: Mapping[str, Any]) -> None:
    """Checks what vLLM reads of a checkpoint of the library `speculators`.

    Raises:
        ValueError: it cannot be read.
    """
    kind = config.get("speculators_model_type")
    if kind is None:
        return
    from vllm.transformers_utils.configs.speculators import algos

    where = f"in {model}/config.json"
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
