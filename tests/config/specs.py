# SPDX-License-Identifier: Apache-2.0
"""Speculative configs, unresolved or resolved as far as a test needs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.utils import get_field
from vllm.engine.arg_utils import EngineArgs

Checkpoint = Callable[..., Path]


def unresolved(model: Path | str, **settings: Any) -> SpeculativeConfig:
    """A config with the user's settings, before validation and resolution."""
    spec = object.__new__(SpeculativeConfig)
    for name in SpeculativeConfig.__dataclass_fields__:
        object.__setattr__(spec, name, get_field(SpeculativeConfig, name).default)
    for name, value in {"model": str(model), **settings}.items():
        object.__setattr__(spec, name, value)
    return spec


def engine_config(target: Path, spec: Any, **engine: Any) -> VllmConfig:
    """The config that `vllm serve` creates; no weights are loaded."""
    arguments = {"dtype": "float32", "enforce_eager": True} | engine
    return EngineArgs(
        model=str(target), speculative_config=spec, **arguments
    ).create_engine_config()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Makes a folder with a config.json and safetensors with these tensor names."""

    def make(config: dict[str, Any], tensors=(), name: str = "drafter") -> Path:
        from safetensors.torch import save_file
        from torch import zeros

        (folder := tmp_path / name).mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: zeros(1) for n in tensors}, folder / "model.safetensors")
        return folder

    return make


def cached(checkpoint: Path, repo: str, monkeypatch) -> str:
    """Moves a checkpoint to an offline Hugging Face cache, with the id `repo`."""
    from huggingface_hub import constants

    cache, commit = checkpoint / "hub", "0" * 40
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).rename(snapshot / name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repo
