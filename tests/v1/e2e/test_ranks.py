# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's with two ranks: tensor, data or pipeline parallel.

Each rank has a GPU, or else a core of the CPU.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import active_children
from typing import Any

import pytest
import torch

from vllm.utils.network_utils import get_open_port

from .hooks import take_defaults_of_a_gpu
from .oracle import assert_output_matches, load_model
from .other_vocabulary import with_other_vocabulary
from .rank_models import as_mixture, with_even_heads
from .runner import Request, Served
from .test_unified_speculator import MODES
from .watches import DummyBatches

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
# Only used on a CPU; without it each rank needs its own NUMA node.
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs, or two cores"),
]


def requests_of(make_prompt, number: int, num_tokens: int) -> list[Request]:
    return [Request(make_prompt(16 + 13 * i, i), num_tokens) for i in range(number)]


def acceptance(served: Served) -> float:
    """Mean accepted tokens per draft."""
    return served.count("num_accepted_tokens") / served.count("num_drafts")


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel(
    vllm_runner, models, target, make_prompt, on_cpu, tmp_path, mode: str, how: str
):
    requests = requests_of(make_prompt, 8, 40)
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
    with vllm_runner(
        env=BOUND,
        speculative_config=spec | {"model": str(drafter), "num_speculative_tokens": 7},
        tensor_parallel_size=2,
        async_scheduling=not on_cpu,
        **SIZES,
    ) as llm:
        served = llm.generate(requests)
        is_told = "split in 2, as the target is" in llm.log
    assert_output_matches(target, requests, served)
    assert acceptance(served) > 0.7
    assert is_told is (how.startswith("whole") and is_head)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs gather no int64")
def test_batch_sharded_sampling_returns_requested_logprobs(
    vllm_runner, models, make_prompt, tmp_path
):
    """Each rank samples half of the requests; all but one ask for two ids' logprobs."""
    ids = [7, 300]
    first, *others = (make_prompt(16 + 13 * i, i) for i in range(4))
    requests = [Request(first, 20)]
    requests += [Request(prompt, 20, logprob_token_ids=ids) for prompt in others]
    drafter = str(with_even_heads(models / "pard", tmp_path))
    with vllm_runner(
        env=BOUND,
        speculative_config=MODES["pard"]
        | {"model": drafter, "num_speculative_tokens": 4},
        tensor_parallel_size=2,
        enable_batch_sharded_sampling=True,
        **SIZES,
    ) as llm:
        served = llm.generate(requests)
    plain, *found = (output.outputs[0] for output in served.outputs)
    assert not plain.logprobs
    for one in found:
        wanted = [{*ids, token} for token in one.token_ids]
        assert [set(row) for row in one.logprobs] == wanted


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_stages(vllm_runner, models, target, make_prompt, on_cpu, mode: str):
    """The last stage has the whole drafter.

    On a CPU stages with a drafter are refused: in vLLM they require async scheduling,
    which is off there. This test uses the defaults of a GPU.
    """
    requests = requests_of(make_prompt, 8, 40)
    with vllm_runner(
        env=BOUND,
        speculative_config=MODES[mode]
        | {"model": str(models / mode), "num_speculative_tokens": 7},
        pipeline_parallel_size=2,
        async_scheduling=True,
        setup=[take_defaults_of_a_gpu] if on_cpu else [],
        **SIZES,
    ) as llm:
        served = llm.generate(requests)
        lacks_states = "drafts without the target's hidden states" in llm.log
    assert_output_matches(target, requests, served)
    assert acceptance(served) > 0.7
    assert lacks_states is (mode == "pard2")


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_data_parallel(
    vllm_runner, models, make_prompt, on_cpu, tmp_path, mode: str, schedule
):
    """One rank has few requests, and then runs dummy batches.

    With "auto" the ranks agree on a draft length, which may be 0.
    """
    folder = as_mixture(models / "target", tmp_path / "mixture")
    requests = requests_of(make_prompt, 12, 48)
    spec = MODES[mode] | {"model": str(models / mode), "num_speculative_tokens": 5}
    start = partial(
        vllm_runner,
        folder,
        speculative_config=spec | {"num_speculative_tokens_per_batch_size": schedule},
        async_scheduling=not on_cpu,
        worker_extension_cls="tests.v1.e2e.exchange.Exchange",
        **SIZES,  # so few that one rank runs long after the other has finished
    )
    port = get_open_port()

    def serve(rank: int, part: list[Request]) -> tuple[Served, int]:
        llm = start(env=rank_environment(rank, port))
        llm.watch(DummyBatches)
        return llm.generate(part), llm.found(DummyBatches)

    parts = requests[1:], requests[:1]
    with ThreadPoolExecutor() as threads:
        try:
            (busy, _), (idle, dummies) = threads.map(serve, (0, 1), parts, timeout=900)
        finally:  # a rank never ends without the other
            for process in active_children():
                process.kill()
    for part, served in zip(parts, (busy, idle), strict=True):
        assert_output_matches(load_model(folder), part, served)
    assert schedule or acceptance(busy) > 0.1
    assert dummies >= 10


def rank_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
