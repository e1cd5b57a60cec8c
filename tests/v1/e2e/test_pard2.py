# SPDX-License-Identifier: Apache-2.0
"""PARD-2's drafts, where the state before a step's tokens is not in that step.

Prompts in chunks, cached prefixes (some of them computed in the same step), preemption
and several passes: the drafts are those of plain PyTorch, which computes all at once.
"""

from typing import Any

import pytest

from tests.checkpoints.families import write_drafter, write_target

from .conftest import ENGINE
from .head_oracle import Pard2Oracle, load_model
from .test_published_drafters import run_engines

DRAFTER, TARGET, LAYERS = "pard2-qwen3", "qwen3", (8, 6, 4, 2)
BLOCK, MAX_MODEL_LEN = 32, 160
SHARED = list(range(300, 300 + 2 * BLOCK))
# Prefixes that end where a block does, before it and after it.
ENDINGS = ([7, 8, 9], [11] * 40, [])
TOGETHER = [*(SHARED + ending for ending in ENDINGS), SHARED[:33], [5], [9] * 31]
# Two of them fit into the KV cache of "tight" when they start, but not to the end.
GROWING = [list(range(100 * i, 100 * i + 60)) for i in range(1, 4)]
PROMPTS = {"together": TOGETHER, "again": TOGETHER, "growing": GROWING}
# Name of an engine: its scenarios, and what it is started with. "wide" computes prompts
# at once and finds them cached later on, and replays its passes as with CUDA graphs.
# "tight" computes them in chunks, preempts, schedules ahead and drafts in two passes.
SCENARIOS = {"wide": ("together", "again"), "tight": ("growing", "together")}
SPECULATIVE = {
    "wide": {"num_speculative_tokens": 5},
    "tight": {"num_speculative_tokens": 6, "parallel_drafting_width": 4},
}
ENGINES: dict[str, dict[str, Any]] = {
    "wide": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    "tight": {
        "max_num_batched_tokens": 40,
        "max_num_seqs": 3,
        "num_gpu_blocks_override": 1 + MAX_MODEL_LEN // BLOCK,
    },
}


def engine_job(name: str, drafter: str, target: str) -> dict[str, Any]:
    def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
        tokens = 40 if prompts is GROWING else 12
        return [{"prompt": prompt, "max_tokens": tokens} for prompt in prompts]

    return {
        "async_scheduling": name == "tight",
        "idle_every": 5,
        "record_drafts": True,
        "record_graphs": name == "wide",
        "engine": {
            **ENGINE,
            "model": target,
            "speculative_config": {"model": drafter, **SPECULATIVE[name]},
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK,
            **ENGINES[name],
        },
        "scenarios": {each: requests(PROMPTS[each]) for each in SCENARIOS[name]},
    }


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pard2")
    target = write_target(TARGET, folder / "target", models / "target")
    return write_drafter(DRAFTER, folder / "drafter", target), target


@pytest.fixture(scope="module")
def results(folders, engine_env, tmp_path_factory) -> dict[str, Any]:
    jobs = {name: engine_job(name, *map(str, folders)) for name in ENGINES}
    return run_engines(jobs, engine_env, tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module")
def oracle(folders) -> Pard2Oracle:
    drafter, target = folders
    return Pard2Oracle(drafter, load_model(target), LAYERS)


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_are_those_of_one_computation(name: str, results, oracle: Pard2Oracle):
    result, spec = results[name], SPECULATIVE[name]
    assert "error" not in result, result["error"]
    assert result["drafter"] == "Pard2Drafter"
    assert result["idle_batches"] > 0 and result["touched_kv"] == 0
    width = spec.get("parallel_drafting_width", spec["num_speculative_tokens"])
    scenarios, compared = result["scenarios"], 0
    for scenario, found in scenarios.items():
        prompts = PROMPTS[scenario]
        texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
        for request, known, drafts in found["drafts"][::2]:
            text = texts[int(request)]
            if known <= len(text):
                wanted = oracle.drafts(text[:known], len(drafts), width)
                assert drafts == wanted, f"request {request} after {known} tokens"
                compared += 1
    assert compared > 40
    if name == "wide":
        assert result["replays"]["first"] > 0
        assert scenarios["again"]["tokens"] == scenarios["together"]["tokens"]
    else:
        assert scenarios["growing"]["counters"]["num_preemptions"][0] > 0
