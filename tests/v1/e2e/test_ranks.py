# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's with two ranks: tensor, data or pipeline parallel.

Each rank has a GPU, or else a core of the CPU.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from vllm.utils.network_utils import get_open_port

from .engine import Engines
from .oracle import assert_greedy_output_matches, load_model
from .other_vocabulary import with_other_vocabulary
from .rank_models import as_mixture, with_even_heads
from .test_unified_speculator import MODES

CORES = sorted(os.sched_getaffinity(0))
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else len(CORES)
# Keys of the speculative config. With the second, ranks exchange the best token of
# their part of the vocabulary, with the third whole logits.
TENSOR_PARALLEL: dict[str, dict[str, Any]] = {
    "plain": {},
    "local argmax": {"use_local_argmax_reduction": True},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "tree": {"draft_tree": 15},
    "other vocabulary": {"use_heterogeneous_vocab": True},
    "whole": {"draft_tensor_parallel_size": 1},
    "whole tree": {"draft_tensor_parallel_size": 1, "draft_tree": 15},
    "whole, probabilistic": {
        "draft_tensor_parallel_size": 1,
        "draft_sample_method": "probabilistic",
    },
}
SIZES = {"max_model_len": 512, "max_num_seqs": 4}
MakeEngines = Callable[[dict[str, str]], Engines]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs, or two cores"),
]


@pytest.fixture
def make_engines(engine_env, tmp_path_factory) -> MakeEngines:
    """Makes engines with an environment, each in a separate process."""

    def make(env: dict[str, str]) -> Engines:
        folder = tmp_path_factory.mktemp("rank")
        return Engines(engine_env | env, folder, forks=False)

    return make


def scenario(prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    return {"all": [{"prompt": each, "max_tokens": num_tokens} for each in prompts]}


def acceptance(result: dict[str, Any]) -> float:
    """Mean accepted tokens per draft."""
    counters = result["scenarios"]["all"]["counters"]
    return counters["num_accepted_tokens"][0] / counters["num_drafts"][0]


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel(
    make_engines: MakeEngines,
    models,
    target,
    make_prompt,
    on_cpu,
    tmp_path,
    mode: str,
    how: str,
):
    prompts = [make_prompt(16 + 13 * i, i) for i in range(8)]
    is_head = MODES[mode]["method"] != "draft_model"
    is_whole = how.startswith("whole") and not is_head
    # An odd number of heads cannot be split.
    drafter = models / mode if is_whole else with_even_heads(models / mode, tmp_path)
    if how == "other vocabulary":
        if is_head:
            pytest.skip("drafts in the target's vocabulary")
        folder = tmp_path / "other"
        drafter = with_other_vocabulary(drafter, models / "target", folder).folder
    spec = MODES[mode] | TENSOR_PARALLEL[how]
    spec |= {"model": str(drafter), "num_speculative_tokens": 7}
    # Only used on a CPU; without it each rank needs its own NUMA node.
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
    result = make_engines(env).run(
        scenario(prompts, 40),
        model=str(models / "target"),
        speculative_config=spec,
        tensor_parallel_size=2,
        async_scheduling=not on_cpu,
        **SIZES,
    )
    assert_greedy_output_matches(target, prompts, result["scenarios"]["all"]["tokens"])
    assert acceptance(result) > 0.7
    is_told = "split in 2, as the target is" in result["log"]
    assert is_told is (how.startswith("whole") and is_head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs gather no int64")
def test_batch_sharded_sampling_returns_requested_logprobs(
    make_engines: MakeEngines, models, make_prompt, tmp_path
):
    """Each rank samples half of the requests; all but one ask for two ids' logprobs."""
    ids = [7, 300]
    requests = scenario([make_prompt(16 + 13 * i, i) for i in range(4)], 20)
    for request in requests["all"][1:]:
        request["sampling"] = {"logprob_token_ids": ids}
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
    result = make_engines(env).run(
        requests,
        model=str(models / "target"),
        speculative_config={
            "model": str(with_even_heads(models / "pard", tmp_path)),
            "num_speculative_tokens": 4,
            **MODES["pard"],
        },
        tensor_parallel_size=2,
        enable_batch_sharded_sampling=True,
        **SIZES,
    )
    found = result["scenarios"]["all"]
    for tokens, (rows,) in zip(found["tokens"][1:], found["logprobs"][1:], strict=True):
        wanted = [{str(token) for token in (*ids, one)} for one in tokens]
        assert [row.keys() for row in rows] == wanted
    assert found["logprobs"][0] == [[]]


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_stages(
    make_engines: MakeEngines, models, target, make_prompt, on_cpu, mode: str
):
    """The last stage has the whole drafter.

    On a CPU stages with a drafter are refused: in vLLM they require async scheduling,
    which is off there. This test uses the defaults of a GPU.
    """
    prompts = [make_prompt(16 + 13 * i, i) for i in range(8)]
    spec = MODES[mode] | {"model": str(models / mode), "num_speculative_tokens": 7}
    env = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
    result = make_engines(env).run(
        scenario(prompts, 40),
        model=str(models / "target"),
        speculative_config=spec,
        pipeline_parallel_size=2,
        async_scheduling=True,
        defaults_of_a_gpu=on_cpu,
        **SIZES,
    )
    assert_greedy_output_matches(target, prompts, result["scenarios"]["all"]["tokens"])
    assert acceptance(result) > 0.7
    lacks_states = "drafts without the target's hidden states" in result["log"]
    assert lacks_states is (mode == "pard2")


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_data_parallel(
    make_engines: MakeEngines,
    models,
    make_prompt,
    on_cpu,
    tmp_path,
    mode: str,
    schedule,
):
    """One rank has few requests, and then runs dummy batches.

    With "auto" the ranks agree on a draft length, which may be 0.
    """
    folder = as_mixture(models / "target", tmp_path / "mixture")
    prompts = [make_prompt(16 + 13 * i, i) for i in range(12)]
    spec = MODES[mode] | {"model": str(models / mode), "num_speculative_tokens": 5}
    spec["num_speculative_tokens_per_batch_size"] = schedule
    port = get_open_port()
    ranks = [make_engines(rank_environment(rank, port)) for rank in range(2)]

    def run(engines: Engines, part: list[list[int]]) -> dict[str, Any]:
        return engines.run(
            scenario(part, 48),
            model=str(folder),
            speculative_config=spec,
            async_scheduling=not on_cpu,
            worker_extension_cls="exchange.Exchange",
            **SIZES,  # so few that one rank runs long after the other has finished
        )

    with ThreadPoolExecutor() as threads:
        running = threads.map(run, ranks, (prompts[1:], prompts[:1]), timeout=900)
        try:
            busy, idle = running
        finally:  # a rank never ends without the other
            for engines in ranks:
                engines.process.kill()
    answers = [result["scenarios"]["all"]["tokens"] for result in (idle, busy)]
    assert_greedy_output_matches(load_model(folder), prompts, answers[0] + answers[1])
    assert schedule or acceptance(busy) > 0.1
    assert idle["idle_batches"] >= 10


def rank_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
