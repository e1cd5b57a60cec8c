# SPDX-License-Identifier: Apache-2.0
"""Rows of speculative configs and checkpoints, and how the latter are broken.

Each row breaks a copy of one bundled drafter, or asks for what it cannot do.
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
GONE = object()  # in place of a value: the key, or tensor, is taken away
Break = Callable[[Path], None]
Tensors = dict[str, torch.Tensor]


class Row:
    """One row.

    Attributes:
        says: some words of the one error in `docs/troubleshooting.md` that users see;
            of a row that is not refused, what it shows.
        breaks: what is done to a copy of the drafter, one after the other.
        drafter: name of the bundled drafter that the row starts from.
        spec: changes of the speculative config; a string or list stands in its place.
        without: keys that it does not have.
        engine: engine arguments beyond model and speculative config.
        env: environment variables.
    """

    def __init__(
        self,
        says: str,
        *breaks: Break,
        drafter: str = "pard",
        spec: Any = None,
        without: Collection[str] = (),
        engine: Mapping[str, Any] = EMPTY,
        env: Mapping[str, str] = EMPTY,
        **settings: Any,
    ) -> None:
        """`settings` are the speculative config's, where `spec` is not all of it."""
        self.says, self.breaks, self.drafter = says, breaks, drafter
        self.spec, self.without = spec or settings, without
        self.engine, self.env = engine, env

    def speculative_config(self, model: Path) -> Any:
        """What the user passes; `model` is the broken copy."""
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


# Breaking them.


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
    """Changes keys of config.json; "section__key" names a key of a section."""

    def change(whole: dict[str, Any]) -> None:
        for path, value in changes.items():
            *sections, key = path.split("__")
            section = whole
            for name in sections:
                section = section[name]
            put(section, key, value)

    return edited(CONFIG, change)


def rotated(first: int, last: int) -> Break:
    """Tokens of these ids take each the next one's place, the last the first one's."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokens = tokenizer["model"]["vocab"]
        for token, number in tokens.items():
            if first <= number < last:
                tokens[token] = first + (number + 1 - first) % (last - first)

    return edited("tokenizer.json", change)


def reweighed(change: Callable[[Tensors], Tensors]) -> Break:
    """Puts other tensors in place of the drafter's."""

    def apply(folder: Path) -> None:
        save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)

    return apply


def tensors(changes: dict[str, Any]) -> Break:
    """Takes tensors away, puts others, or zeros of a shape, in their place."""

    def change(weights: Tensors) -> Tensors:
        for name, value in changes.items():
            if isinstance(value, tuple):
                value = torch.zeros(value, dtype=torch.bfloat16)
            put(weights, name, value)
        return weights

    return reweighed(change)


def file(name: str, content: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content) and None


def saved(name: str, value: Any) -> Break:
    """A file of torch.save."""
    return lambda folder: torch.save(value, folder / name)


def gone(*names: str) -> Break:
    """Takes files away; without names the folder itself."""

    def apply(folder: Path) -> None:
        for path in [folder / name for name in names] or list(folder.iterdir()):
            path.unlink()
        if not names:
            folder.rmdir()

    return apply


def cut(name: str, size: int) -> Break:
    """Leaves the first `size` bytes of a file; negative, all but so many."""

    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return apply
