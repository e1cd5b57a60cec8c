# SPDX-License-Identifier: Apache-2.0
"""Rows of speculative configs and checkpoints that cannot work, and how to make them.

Each row breaks a copy of one bundled drafter, or asks for what it cannot do.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
GONE = object()  # in place of a value: the key, or tensor, is taken away
Break = Callable[[Path], None]


@dataclass(frozen=True)
class Bad:
    """One row.

    Attributes:
        id: what is wrong, in a few words.
        says: some words of the one error in `docs/troubleshooting.md` that users see.
        drafter: name of the bundled drafter that the row starts from.
        breaks: what is done to a copy of it, one after the other.
        spec: changes of the speculative config; a string or list stands in its place.
        engine: engine arguments beyond model and speculative config.
        env: environment variables.
    """

    id: str
    says: str
    drafter: str = "pard"
    breaks: tuple[Break, ...] = ()
    spec: Any = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def speculative_config(row: Bad, model: Path) -> Any:
    """What the user passes; `model` is the broken copy."""
    if not isinstance(row.spec, dict):
        return row.spec
    config = {"model": str(model), "num_speculative_tokens": 4}
    if row.drafter in ("eagle3", "peagle"):
        config["method"] = "eagle3"
    config |= {
        key: str(model / value.name) if isinstance(value, Path) else value
        for key, value in row.spec.items()
    }
    return {key: value for key, value in config.items() if value is not GONE}


def config(**changes: Any) -> Break:
    """Changes keys of config.json; "section__key" names a key of a section."""

    def apply(folder: Path) -> None:
        file = folder / "config.json"
        whole = json.loads(file.read_text())
        for path, value in changes.items():
            *sections, key = path.split("__")
            section = whole
            for name in sections:
                section = section[name]
            if value is GONE:
                del section[key]
            else:
                section[key] = value
        file.write_text(json.dumps(whole))

    return apply


def tensors(changes: dict[str, Any]) -> Break:
    """Takes tensors away, puts others, or zeros of a shape, in their place."""

    def apply(folder: Path) -> None:
        file = folder / WEIGHTS
        weights = load_file(file)
        for name, value in changes.items():
            if value is GONE:
                del weights[name]
            elif isinstance(value, tuple):
                weights[name] = torch.zeros(value, dtype=torch.bfloat16)
            else:
                weights[name] = value
        save_file(weights, file)

    return apply


def without_layer(number: int) -> Break:
    def apply(folder: Path) -> None:
        file = folder / WEIGHTS
        part = f"layers.{number}."
        kept = {name: w for name, w in load_file(file).items() if part not in name}
        save_file(kept, file)

    return apply


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
