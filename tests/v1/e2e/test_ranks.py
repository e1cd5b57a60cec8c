# SPDX-License-Identifier: Apache-2.0
"""Two ranks, tensor-parallel and data-parallel: the target's own output?

On GPUs each rank has one, else a core of the CPU.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT

from .oracle import load_model, same_as_alone
from .rank_models import as_mixture, with_even_heads
from .test_unified_speculator import MODES, PARALLEL

PROGRAM = [sys.executable, "-m", "tests.v1.e2e.ranks_job"]
EXCHANGE = "tests.v1.e2e.exchange.Exchange"
CORES = sorted(os.sched_getaffinity(0))
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else len(CORES)
# What is set of the speculative config. The second exchanges the best token of each
# rank's part of the vocabulary, the third whole logits.
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "plain": {},
    "local argmax": {"use_local_argmax_reduction": True},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "tree": {"draft_tree": 15},
}
RunRanks = Callable[..., list[dict[str, Any]]]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs, or two cores"),
]


@pytest.fixture
def run_ranks(engine_env, on_cpu: bool, tmp_path: Path) -> RunRanks:
    """Runs jobs of `ranks_job.py` at the same time, each with its own environment."""

    def run(*jobs: tuple[dict[str, Any], dict[str, str]]) -> list[dict[str, Any]]:
        started = [
            start(job, engine_env | env, tmp_path / str(number))
            for number, (job, env) in enumerate(jobs)
        ]
        try:
            for process, place in started:
                log = (place / "log").read_text
                assert process.wait(timeout=900) == 0, log()[-6000:]
        finally:
            for process, _ in started:
                process.kill()
        results = [(place / "result.json").read_text() for _, place in started]
        return [json.loads(result) for result in results]

    def start(job: dict[str, Any], env: dict[str, str], place: Path):
        place.mkdir()
        memory = {"gpu_memory_utilization": 0.1, "enforce_eager": True}
        if not on_cpu:
            memory = {"kv_cache_memory_bytes": 1 << 30}
        job = job | {"engine": {"dtype": "float32", **memory, **job["engine"]}}
        files = place / "job.json", place / "result.json"
        files[0].write_text(json.dumps(job))
        with (place / "log").open("w") as log:
            command = [*PROGRAM, *map(str, files)]
            env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=log, stderr=log
            )
        return process, place

    return run


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel(
    run_ranks: RunRanks, models, target, make_prompt, tmp_path, mode: str, how: str
):
    if how == "tree" and mode not in PARALLEL:
        pytest.skip("drafts one token at a time")
    prompts = [make_prompt(16 + 13 * i, i) for i in range(8)]
    drafter = with_even_heads(models / mode, tmp_path)
    spec = MODES[mode] | TENSOR_PARALLEL[how]
    spec |= {"model": str(drafter), "num_speculative_tokens": 7}
    job = {
        "engine": {
            "model": str(models / "target"),
            "speculative_config": spec,
            "tensor_parallel_size": 2,
            "max_model_len": 512,
            "max_num_seqs": 4,
        },
        "prompts": prompts,
        "max_tokens": 40,
        "counts_idle_batches": False,
    }
    # Only a CPU reads it; without it ranks want a NUMA node each.
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
    (found,) = run_ranks((job, env))
    same_as_alone(target, prompts, found["tokens"])
    assert found["accepted"] > 0.7 * found["drafts"]


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_data_parallel(
    run_ranks: RunRanks, models, make_prompt, tmp_path, mode: str, schedule
):
    """One rank has little to do, and then joins in with batches of nothing.

    With "auto" the ranks agree on how far to draft, which may be not at all.
    """
    folder = as_mixture(models / "target", tmp_path / "mixture")
    prompts = [make_prompt(16 + 13 * i, i) for i in range(12)]
    spec = MODES[mode] | {"model": str(models / mode), "num_speculative_tokens": 5}
    spec["num_speculative_tokens_per_batch_size"] = schedule
    engine = {
        "model": str(folder),
        "speculative_config": spec,
        "max_model_len": 512,
        "max_num_seqs": 4,  # so few that one rank goes on long after the other
        "worker_extension_cls": EXCHANGE,
    }
    shared = {"engine": engine, "max_tokens": 48, "counts_idle_batches": True}
    port = free_port()
    parts = [prompts[1:], prompts[:1]]
    busy, idle = run_ranks(
        *(
            (shared | {"prompts": part}, rank_environment(rank, port))
            for rank, part in enumerate(parts)
        )
    )
    same_as_alone(load_model(folder), prompts, idle["tokens"] + busy["tokens"])
    assert schedule or busy["accepted"] > 0.1 * busy["drafts"]
    assert idle["idle_batches"] >= 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
