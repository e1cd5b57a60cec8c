# SPDX-License-Identifier: Apache-2.0
"""Test cases (rows) of speculative configs, and ways to break checkpoints.

Each row changes a copy of a bundled drafter, or the config that it is used with.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CONFIG, WEIGHTS, WARP = "config.json", "model.safetensors", "warp_model.bin"
EMPTY: Mapping[str, str] = MappingProxyType({})
GONE = object()  # as a value: the key or tensor is removed
Break = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]


class Row:
    """One row.

    It `says` words of the error, which `docs/troubleshooting.md` lists by itself or as
    one of a kind; for an accepted config, a description.
    """

    def __init__(
        self,
        says: str,
        *breaks: Break,  # of the copy of the drafter, in order
        drafter: str = "pard",  # the bundled one that is copied
        spec: Any = None,  # changes to the speculative config; if no dict, replaces it
        without: Collection[str] = (),  # keys to remove from it
        engine: Mapping[str, Any] = EMPTY,  # further engine arguments
        env: Mapping[str, str] = EMPTY,
        **settings: Any,  # is `spec`, if that is not given
    ) -> None:
        self.says, self.breaks, self.drafter = says, breaks, drafter
        self.spec, self.without = spec or settings, without
        self.engine, self.env = engine, env

    def speculative_config(self, model: Path) -> Any:
        """The config that the user passes; `model` is the changed copy."""
        if not isinstance(self.spec, dict):
            return self.spec
        config = {"model": str(model), "num_speculative_tokens": 4}
        if self.drafter in ("eagle3", "peagle"):
            config["method"] = "eagle3"
        config |= {
            key: str(model / value.name) if isinstance(value, Path) else value
            for key, value in self.spec.items()
        }
        return {k: value for k, value in config.items() if k not in self.without}


# Changes to checkpoints.


def edited(name: str, change: Callable[[dict[str, Any]], None]) -> Break:
    """Changes the content of a JSON file."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def put(values: dict[str, Any], key: str, value: Any) -> None:
    if value is GONE:
        del values[key]
    else:
        values[key] = value


def config(**changes: Any) -> Break:
    """Changes keys of config.json; "section__key" is a nested key."""

    def change(whole: dict[str, Any]) -> None:
        for path, value in changes.items():
            *sections, key = path.split("__")
            section = whole
            for name in sections:
                section = section[name]
            put(section, key, value)

    return edited(CONFIG, change)


def rotated(first: int, last: int) -> Break:
    """Rotates the tokens with ids from `first` to `last` (exclusive) by one id."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokens = tokenizer["model"]["vocab"]
        for token, number in tokens.items():
            if first <= number < last:
                tokens[token] = first + (number + 1 - first) % (last - first)

    return edited("tokenizer.json", change)


def edited_weights(change: Callable[[Tensors], Tensors]) -> Break:
    """Changes the drafter's tensors."""

    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return apply


def tensors(changes: dict[str, Any]) -> Break:
    """Replaces tensors by others, by zeros of a shape or by `fill` in a `shape`, or
    removes them."""

    def change(weights: Tensors) -> Tensors:
        for name, value in changes.items():
            if isinstance(value, Mapping):
                value = torch.full(tuple(value["shape"]), value["fill"])
            elif isinstance(value, tuple | list):
                value = torch.zeros(tuple(value), dtype=torch.bfloat16)
            put(weights, name, GONE if value is None else value)
        return weights

    return edited_weights(change)


def file(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content) and None


def saved(name: str, value: Any) -> Break:
    """Writes a file with torch.save."""
    return lambda folder: torch.save(value, folder / name)


def removed(*names: str) -> Break:
    """Removes files; without names, the whole folder."""

    def apply(folder: Path) -> None:
        for path in [folder / name for name in names] or list(folder.iterdir()):
            path.unlink()
        if not names:
            folder.rmdir()

    return apply


def truncated(name: str, size: int) -> Break:
    """Truncates a file to `size` bytes; if negative, by that many."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return apply


# Keys of a row that change the copy of the drafter.
BREAKS: Mapping[str, Callable[[Any], Break]] = {
    "config": lambda changes: config(**changes),
    "tensors": tensors,
    "removed": lambda names: removed(*names),
    "truncated": lambda cut: truncated(*cut),
    "file": lambda written: file(written[0], written[1].encode("latin-1")),
}


def row_of(told: dict[str, Any]) -> Row:
    """A row of `speculative_configs.yaml`."""
    breaks = [BREAKS[key](told.pop(key)) for key in [*told] if key in BREAKS]
    return Row(told.pop("says"), *breaks, **told)
