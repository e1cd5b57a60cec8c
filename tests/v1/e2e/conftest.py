# SPDX-License-Identifier: Apache-2.0
"""Engines and prompts for end-to-end tests.

Outputs are compared with plain PyTorch: see `oracle.py`.
"""

import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.conftest import ROOT

from .oracle import load_model
from .recorded import GRAPHS, Replays, record_calls
from .runner import Setup, VllmRunner

# Modules that an engine without a GPU imports when it starts.
IMPORTED_LATE = [
    "tests.v1.e2e.hooks",
    "tests.v1.e2e.recorded",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
]
# On a GPU tests run in parallel, so none may take a share of the free memory.
KV_CACHE_BYTES = 1 << 30


@pytest.fixture(scope="session")
def vllm_runner(
    models: Path, engine_env, on_cpu: bool, tmp_path_factory
) -> Callable[..., VllmRunner]:
    """Starts an engine, by default with the bundled target: see `VllmRunner`."""
    common = engine_env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), engine_env.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        # Also on a CPU without drafts, or with vLLM's own speculators.
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    # A process that has imported vLLM forks, unless it may have initialized CUDA.
    context = multiprocessing.get_context("forkserver" if on_cpu else "spawn")
    if on_cpu:
        context.set_forkserver_preload(IMPORTED_LATE)
        with mock.patch.dict(os.environ, common):
            forkserver.ensure_running()

    def start(
        model: str | Path = models / "target",
        graphs: bool = False,  # of draft passes, which a CPU emulates
        setup: list[Setup] | None = None,  # what the engine's process runs first
        env: dict[str, str] | None = None,
        **arguments: Any,  # beside those of `ENGINE`
    ) -> VllmRunner:
        arguments["model"] = str(model)
        if not on_cpu:
            arguments.setdefault("kv_cache_memory_bytes", KV_CACHE_BYTES)
            arguments |= GRAPHS if graphs else {}
        log = tmp_path_factory.mktemp("engine") / "log.txt"
        llm = VllmRunner(context, log, common | (env or {}), setup or [], arguments)
        if graphs:
            if on_cpu:
                llm.call(record_calls)
            llm.watch(Replays)
        return llm

    return start


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
