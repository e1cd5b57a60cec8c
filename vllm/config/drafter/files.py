# SPDX-License-Identifier: Apache-2.0
"""Reads config.json and the headers of weight files; refuses broken files.

Several checks ask for them: a file is read once, as long as it does not change.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000  # bytes; the format's own limit
AGAIN = "download or export the checkpoint again"


T = TypeVar("T")


def once(read: Callable[[Path], T]) -> Callable[[Path], T]:
    """A function that reads a file again only if it has changed. Errors are not kept.

    What it returns is shared: nobody may change it.
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
    """What a header says of one tensor."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


@once
def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name.

    Raises:
        ValueError: the file is cut short, or is none.
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
    """The tensors that would be loaded from a folder, by name; none without headers.

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
    """Names of the files that an index names, all of them beside it."""
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
    """Names of the tensors in a folder; none where no header can be read.

    What is broken is left to whoever loads it: it may be that nobody does.
    """
    try:
        if found := read_headers(folder):
            return list(found)
    except ValueError:
        return []
    return [name for file in folder.glob("*.bin") for name in _pickled_names(file)]


def _pickled_names(file: Path) -> list[str]:
    """Names in a file of torch.save, of which neither code nor data is read."""
    import torch

    try:
        tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError, OSError):
        return []
    return list(tensors) if isinstance(tensors, Mapping) else []
