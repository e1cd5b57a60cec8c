# SPDX-License-Identifier: Apache-2.0
"""Finds and reads a drafter's files: its folder, config.json, headers of weight files.

Several checks need them, so a file is read again only if it has changed.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, partial, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import huggingface_hub
import torch
from huggingface_hub import HfApi, constants, file_download, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

import vllm.envs as envs
from vllm.logger import init_logger

from .drafter import OWN_CHECKPOINTS
from .families import (
    AGAIN,
    DraftCheckpoint,
    check_values,
    overridden,
    read_checkpoint,
)

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

logger = init_logger(__name__)

# Model types that transformers does not know, and the types to read them as.
MODEL_TYPES = {"llama_peagle": "llama"}
CONFIGS = ("config.json", "params.json")
INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
MODEL = '"model" of speculative_config'
# Words in a path from which vLLM derives the method of a drafter.
WORDS = ("eagle-", "eagle3", "dflash", "dspark")
SHOWN = 100  # characters of an invalid name that an error quotes

T = TypeVar("T")


# A drafter's checkpoint as a whole.


def find_checkpoint(spec: "SpeculativeConfig") -> DraftCheckpoint | None:
    """How a config's `model` drafts, by its files; None if it has none that say it.

    vLLM then goes by words in its path. Refuses missing files, and those that cannot be
    a drafter's.
    """
    if not needs_model(spec):
        return None
    check_name(spec.model)
    if names_a_path(spec.model):
        check_folder(spec)
    else:
        check_hub(spec)
    if (config := load_config(spec)) is None:
        check_root(spec)
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
    if (file := Path(spec.model) / "config.json").is_file():
        return read_config(file)
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(spec.model, revision=spec.revision)[0]
    except (OSError, ValueError):
        return None  # vLLM reports what is wrong with it


# Names of drafters: folders, and models on the hub.


def check_name(model: str | None) -> None:
    """Refuses a missing name, and one of a file or folder that cannot be opened."""
    if not (model or "").strip():
        raise ValueError(
            'speculative_config has no "model": name the folder or the hub id of a '
            'drafter, or a "method" that needs none, such as "ngram".'
        )
    try:
        os.stat(model)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # too long, not permitted, a null character
        why = error.strerror if isinstance(error, OSError) else error
        shown = model if len(model) < SHOWN else f"{model[:SHOWN]}…"
        raise ValueError(
            f"{MODEL}: {shown!r} cannot be opened ({why}): name a folder or the hub id "
            "of a drafter."
        ) from None


def names_a_path(model: str) -> bool:
    """Whether a model can only be a local path, or is one that exists."""
    if "://" in model:
        return False
    is_path = model.startswith(("/", "./", "../")) or model.count("/") > 1
    return is_path or Path(model).exists()


def check_folder(spec: "SpeculativeConfig") -> None:
    """Refuses a local drafter that is no folder with a config."""
    folder, target = Path(spec.model), spec.target_model_config
    if folder.suffix == ".gguf":
        return
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(
            f"{MODEL}: {folder} {what}: name the folder that holds the drafter's "
            "config.json and weights."
        )
    if target is not None and target.config_format not in ("auto", "hf", "mistral"):
        return
    if any((folder / name).is_file() for name in CONFIGS):
        return
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{MODEL}: {folder} is a LoRA adapter, which cannot draft: merge it into "
            "its base model, and name the merged model."
        )
    inside = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    such = f", such as {' or '.join(inside[:5])}" if inside else ""
    raise ValueError(
        f"{MODEL}: {folder} has no config.json: name a drafter's folder{such}, or "
        f"{AGAIN}."
    )


def check_hub(spec: "SpeculativeConfig") -> None:
    """`check_exists` of a drafter that is not a local path."""
    target = spec.target_model_config
    is_local = os.path.isdir(getattr(target, "model", None) or "")
    known = spec.revision, getattr(target, "hf_token", None)
    check_exists(MODEL, spec.model, *known, is_local)


def check_root(spec: "SpeculativeConfig") -> None:
    """Refuses a repository on the hub whose configs are in subfolders, which vLLM does
    not load; to be called if none could be read. vLLM reports other reasons."""
    if names_a_path(spec.model) or envs.VLLM_USE_MODELSCOPE:
        return
    try:
        files = HfApi().list_repo_files(spec.model, revision=spec.revision)
    except Exception:  # no answer, or no repository
        return
    folders = sorted(name.rpartition("/")[0] for name in files if "/config.j" in name)
    if folders and not set(CONFIGS) & set(files):
        raise ValueError(
            f"{MODEL}: {spec.model} has its config.json only in {', '.join(folders)}: "
            "download it, and name one of these folders."
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
    if Path(model).exists():
        return False
    if names_a_path(model):
        return True
    cached = repo_folder_name(repo_id=model, repo_type="model")
    may_be_a_path = (
        (is_local or ("/" in model and Path(model).parent.is_dir()))
        and ":" not in model  # a URL, or a file of a repository
        and not Path(constants.HF_HUB_CACHE, cached).is_dir()
        and not envs.VLLM_USE_MODELSCOPE
    )
    return may_be_a_path and not _is_on_hub(model, revision, token)


def _is_on_hub(model: str, revision: str | None, token: Any) -> bool:
    url = hf_hub_url(model, "config.json", revision=revision)
    try:
        file_download.get_hf_file_metadata(url, token=token)
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        return True
    except HfHubHTTPError as error:
        # With any other status the repository exists, and vLLM may be able to read it.
        return not isinstance(error, RepositoryNotFoundError)
    except Exception:  # no answer; its type depends on the HTTP library
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


# Single files.


def once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """Caches what `read` returns for a file until the file changes; but no errors.

    The returned value is shared: do not modify it.
    """
    cached = lru_cache(maxsize=64)(lambda file, size, modified: read(file))

    @wraps(read)
    def read_if_changed(file: Path) -> T:
        status = file.stat()
        return cached(file, status.st_size, status.st_mtime_ns)

    return read_if_changed


def parse_json(file: Path) -> Mapping[str, Any]:
    """The content of a JSON file, such as config.json; refuses what is no object."""
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
    """The tensors of a safetensors file by name; refuses a broken file."""
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
    """The safetensors tensors that would be loaded from a folder, by name; refuses
    broken files, and an index that names missing ones or those of another folder."""
    files, index = sorted(folder.glob("*.safetensors")), folder / INDEX
    if index.is_file():
        try:
            names = {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
            is_beside = all(name == Path(name).name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index} is not a safetensors index: {AGAIN}.") from None
        if not is_beside:
            raise ValueError(
                f"{index} must name files of its own folder, but its weight_map names "
                f"{sorted(names)}: {AGAIN}, from a source that you trust."
            )
        files = [folder / name for name in sorted(names)]
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is missing, which {INDEX} names: {AGAIN}.")
    return {
        name: tensor for file in files for name, tensor in read_header(file).items()
    }


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
