# SPDX-License-Identifier: Apache-2.0
"""Engines for end-to-end tests, and texts for them."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .engine import ENGINE, V1, Engines
from .oracle import load_model

RunJob = Callable[..., dict[str, Any]]
RunEngine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_job(engine_env, on_cpu: bool, tmp_path_factory) -> Iterator[RunJob]:
    """Runs a job of `engine_job.py`, on Runner V2 or V1; returns its result, or error.

    An engine's own arguments are added to those that all have.
    """
    started: dict[str, Engines] = {}

    def run(job: dict[str, Any], runner: str = "V2") -> dict[str, Any]:
        if runner not in started:
            env = engine_env | (V1 if runner == "V1" else {})
            folder = tmp_path_factory.mktemp(f"engines-{runner}")
            started[runner] = Engines(env, folder, forks=on_cpu)
        return started[runner].run(job | {"engine": ENGINE | job["engine"]})

    yield run
    for engines in started.values():
        engines.end()


@pytest.fixture(scope="session")
def run_engine(models: Path, run_job: RunJob) -> RunEngine:
    """Runs scenarios in an engine with the bundled target.

    Arguments: the scenarios, the runner, the speculative config, what `engine_job.py`
    explains, and the engine's own arguments.
    """
    asked_for = ("async_scheduling", "idle_every", "record_drafts", "record_graphs")
    asked_for += ("keep_drafts", "watch_drafts")

    def run(scenarios, runner="V2", speculative_config=None, **more):
        how = {name: more.pop(name) for name in asked_for if name in more}
        engine = {"model": str(models / "target"), **more}
        engine["speculative_config"] = speculative_config
        result = run_job(how | {"engine": engine, "scenarios": scenarios}, runner)
        assert "error" not in result, result["log"][-6000:]
        assert result["is_v2"] == (runner == "V2")
        return result

    return run


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
