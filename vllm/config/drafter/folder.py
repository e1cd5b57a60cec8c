# SPDX-License-Identifier: Apache-2.0
"""Checks that a drafter is named by a folder with a checkpoint, if by a folder."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoint import AGAIN

if TYPE_CHECKING:
    from vllm.config.speculative import SpeculativeConfig

SHOWN = 100  # characters of an invalid name that an error quotes


def check_name(model: str) -> None:
    """Checks that a drafter's name can be that of a folder or of a model on the hub.

    Raises:
        ValueError: it cannot, or the folder must not be read.
    """
    try:
        os.stat(model)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # too long, not permitted, a null character
        why = error.strerror if isinstance(error, OSError) else error
        shown = model if len(model) < SHOWN else f"{model[:SHOWN]}…"
        raise ValueError(
            f'"model" of speculative_config: {shown!r} cannot be opened ({why}): name '
            "a folder or the hub id of a drafter."
        ) from None


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
        f"drafter's folder{_inside(folder)}, or {AGAIN}."
    )


def _inside(folder: Path) -> str:
    """Names the folders that may be meant by the one that holds them."""
    found = sorted(str(file.parent) for file in folder.glob("*/config.json"))
    return f", such as {' or '.join(found[:5])}" if found else ""
