# SPDX-License-Identifier: Apache-2.0
"""Reads a drafter's files: config.json and the headers of weight files.

Several checks need them, so a file is read again only if it has changed.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger

from .drafter import METHODS
from .families import DraftCheckpoint, read_checkpoint

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Model types that transformers does not know, and the types to read them as.
MODEL_TYPES = {"llama_peagle": "llama"}
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
AGAIN = "download or export the checkpoint again"
# Words in a path from which vLLM derives the method of a drafter.
WORDS = ("eagle-", "eagle3", "dflash", "dspark")

T = TypeVar("T")


def once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Caches what `read` returns for a file until the file changes; but no errors.

    The returned value is shared: do not modify it.
    """

    @lru_cache(maxsize=64)
    def cached(file: Path, size: int, modified: int) -> T:
        return read(file)

    @wraps(read)
    def asked(file: Path) -> T:
        status = file.stat()
        return cached(file, status.st_size, status.st_mtime_ns)

    return asked


def parse_json(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file, such as config.json.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON ({error}): {AGAIN}.") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} must hold a JSON object: {AGAIN}.")
    return content


read_config = once(parse_json)


@dataclass(frozen=True)
class Tensor:
    """One tensor, as its file's header describes it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@once
def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ValueError: the file is cut short, or is not a safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LARGEST_HEADER):
            raise ValueError(
                f"{file} is not a safetensors file, or is cut short ({size} bytes; its "
                f"header would take {length}): {AGAIN}."
            )
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
            found = {
                name: Tensor(name, file, t["dtype"], tuple(t["shape"]))
                for name, t in header.items()
            }
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(
                f"{file} has a corrupt safetensors header: {AGAIN}."
            ) from None
    if size != 8 + length + end:
        raise ValueError(
            f"{file} is cut short or corrupt: its header promises {8 + length + end} "
            f"bytes, it has {size}: {AGAIN}."
        )
    return found


def read_headers(folder: Path) -> dict[str, Tensor]:
    """The safetensors tensors that would be loaded from a folder, by name.

    Raises:
        ValueError: a file is broken, or missing although the index names it.
    """
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        files = [folder / name for name in sorted(_shards(folder / INDEX))]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, which {INDEX} names: {AGAIN}.")
    return {
        name: tensor for file in files for name, tensor in read_header(file).items()
    }


def _shards(index: Path) -> set[str]:
    """The files that an index names, which must be in its own folder."""
    try:
        names = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        is_beside = all(name == Path(name).name for name in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not a safetensors index: {AGAIN}.") from None
    if not is_beside:
        raise ValueError(
            f"{index} must name files of its own folder, but its weight_map names "
            f"{sorted(names)}: {AGAIN}, from a source that you trust."
        )
    return names


def tensor_names(folder: Path) -> list[str]:
    """Names of the tensors in a folder; empty if no header can be read.

    A broken file is no error here, since it may never be loaded.
    """
    try:
        if found := read_headers(folder):
            return list(found)
    except ValueError:
        return []
    return [name for file in folder.glob("*.bin") for name in _pickled_names(file)]


def _pickled_names(file: Path) -> list[str]:
    """Tensor names in a file of torch.save; no code is run and no data read."""
    import torch

    try:
        tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError):
        return []
    return list(tensors) if isinstance(tensors, Mapping) else []


def find_checkpoint(
    spec: "SpeculativeConfig", config: Mapping[str, Any]
) -> DraftCheckpoint:
    """Interprets the files of a config's `model`.

    Args:
        config: its parsed config.json.
    """
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
    """Whether a config's drafter has files that may tell its method.

    With "mtp", and with "dspark" without a model, it is a part of the target.
    """
    if spec.method in ("dflash", "dspark"):
        return spec.model is not None
    if spec.method is not None:
        return spec.method in METHODS
    is_class = type(spec)._is_custom_proposer_path(spec.model)
    return not is_class and spec.model not in ("ngram", "[ngram]")


def _is_misnamed(spec: "SpeculativeConfig") -> bool:
    """Whether a word in its path would make vLLM take a draft model for a head."""
    return has_word(spec) and spec.method in (None, "draft_model")


def has_word(spec: "SpeculativeConfig") -> bool:
    """Whether the model's path has a word from which vLLM derives a method."""
    return any(word in spec.model.lower() for word in WORDS)


def names_a_path(model: str) -> bool:
    """Whether a model can only be a local path, or is one that exists."""
    if "://" in model:
        return False
    is_path = model.startswith(("/", "./", "../")) or model.count("/") > 1
    return is_path or Path(model).exists()


def load_config(spec: "SpeculativeConfig") -> Mapping[str, Any] | None:
    """The parsed config.json; None if it is missing or cannot be read.

    Raises:
        ValueError: it is no JSON object.
    """
    if (file := Path(spec.model) / "config.json").is_file():
        return read_config(file)
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)[0]
    except (OSError, ValueError):
        return None  # vLLM reports what is wrong with it


def _tensor_names(spec: "SpeculativeConfig") -> list[str]:
    """Names of a checkpoint's tensors, local, cached or on the hub.

    Empty for a checkpoint on the hub without safetensors.
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
