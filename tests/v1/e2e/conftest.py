# SPDX-License-Identifier: Apache-2.0
"""Engines and prompts for end-to-end tests.

Tests pass scenarios to `run_engine`, lists of requests that an engine serves one after
the other, and compare the results with plain PyTorch: see `oracle.py`.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .engine import Engines
from .oracle import load_model

RunEngine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_engine(
    models: Path, engine_env, on_cpu: bool, tmp_path_factory
) -> Iterator[RunEngine]:
    """Runs scenarios in an engine, by default with the bundled target.

    See `Engines.run`.
    """
    engines = Engines(engine_env, tmp_path_factory.mktemp("engines"), forks=on_cpu)
    target = str(models / "target")
    yield lambda scenarios, model=target, **given: engines.run(
        scenarios, model=str(model), **given
    )
    engines.end()


@pytest.fixture(scope="session")
def target(models: Path) -> torch.nn.Module:
    """The bundled target in plain PyTorch."""
    return load_model(models / "target")


@pytest.fixture(scope="session")
def make_prompt(held_out_tokens: list[int]) -> Callable[[int, int], list[int]]:
    """A prompt of a given length; the same seed gives the same prompt."""

    def make(length: int, seed: int) -> list[int]:
        last = len(held_out_tokens) - length
        start = random.Random(f"{length}-{seed}").randrange(last)
        return held_out_tokens[start : start + length]

    return make
