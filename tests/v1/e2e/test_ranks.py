# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's with two ranks: tensor, data or pipeline parallel.

Each rank has a GPU, or else a core of the CPU.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.utils.network_utils import get_open_port

from .hooks import take_defaults_of_a_gpu
from .oracle import assert_output_matches, load_model
from .other_vocabulary import with_other_vocabulary
from .runner import Request, Served
from .target_models import prompt, save_head, save_pard, save_pard2, save_target
from .test_unified_speculator import MODES, PARALLEL, speculative
from .watches import DummyBatches

CORES = sorted(os.sched_getaffinity(0))
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else len(CORES)
WHOLE = {"draft_tensor_parallel_size": 1}
PROBABILISTIC = {"draft_sample_method": "probabilistic"}
# Keys of the speculative config, and modes. With "local argmax" ranks exchange the best
# token of their part of the vocabulary, with "probabilistic" whole logits.
TENSOR_PARALLEL: dict[str, tuple[dict[str, Any], Iterable[str]]] = {
    "plain": ({}, MODES),
    "tree": ({"draft_tree": 15}, MODES),
    "local argmax": (
        {"use_local_argmax_reduction": True},
        ("draft", "pard", "eagle3"),
    ),
    "probabilistic": (PROBABILISTIC, ("draft", "pard", "eagle3")),
    "whole": (WHOLE, ("draft", "pard2", "eagle3")),
    "whole tree": (WHOLE | {"draft_tree": 15}, ("draft", "pard")),
    "whole, probabilistic": (WHOLE | PROBABILISTIC, ("pard2",)),
}
CASES = [
    f"{mode}-{how}" for how, (_, modes) in TENSOR_PARALLEL.items() for mode in modes
]
ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "skip_tokenizer_init": True}
# Only used on a CPU; without it each rank needs its own NUMA node.
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs, or two cores"),
]


def requests_of(number: int, num_tokens: int) -> list[Request]:
    return [Request(prompt(16 + 13 * i), num_tokens) for i in range(number)]


def acceptance(served: Served) -> float:
    """Mean accepted tokens per draft."""
    return served.count("num_accepted_tokens") / served.count("num_drafts")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save_target("Llama", tmp_path / "target")


def spec_of(mode: str, folder: Path, drafts: int = 7, **more: Any) -> dict[str, Any]:
    """A drafter that counts."""
    if MODES[mode]["method"] == "eagle3":
        save_head(folder, is_parallel=mode in PARALLEL)
    elif mode == "draft":
        save_target("Llama", folder)
    else:
        {"pard": save_pard, "pard2": save_pard2}[mode](folder)
    spec = {"model": str(folder), "num_speculative_tokens": drafts}
    return spec | MODES[mode] | more


@pytest.mark.parametrize("case", CASES)
def test_tensor_parallel(vllm_runner, target, on_cpu, tmp_path, case: str):
    mode, how = case.split("-")
    requests = requests_of(8, 40)
    with vllm_runner(
        target,
        env=BOUND,
        speculative_config=spec_of(mode, tmp_path / mode, **TENSOR_PARALLEL[how][0]),
        tensor_parallel_size=2,
        async_scheduling=not on_cpu,
        **ENGINE,
    ) as llm:
        served = llm.generate(requests)
        is_told = "split in 2, as the target is" in llm.log
    assert_output_matches(load_model(target), requests, served)
    assert acceptance(served) > 0.7
    is_head = MODES[mode]["method"] != "draft_model"
    assert is_told is (how.startswith("whole") and is_head)


def test_other_vocabulary(vllm_runner, models, make_prompt, on_cpu, tmp_path):
    """Each rank has a part of both vocabularies."""
    requests = [Request(make_prompt(16 + 13 * i, i), 40) for i in range(8)]
    target = models / "target"
    other = with_other_vocabulary(models / "draft", target, tmp_path / "other")
    spec = speculative(models, "draft", 7, use_heterogeneous_vocab=True)
    with vllm_runner(
        env=BOUND,
        speculative_config=spec | {"model": str(other.folder)},
        tensor_parallel_size=2,
        async_scheduling=not on_cpu,
        max_model_len=512,
        max_num_seqs=4,
    ) as llm:
        served = llm.generate(requests)
    assert_output_matches(load_model(target), requests, served)
    assert acceptance(served) > 0.7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs gather no int64")
def test_batch_sharded_sampling_returns_requested_logprobs(
    vllm_runner, target, tmp_path
):
    """Each rank samples half of the requests; all but one ask for two ids' logprobs."""
    ids, (first, *others) = [7, 30], requests_of(4, 20)
    for one in others:
        one.params.logprob_token_ids = ids
    with vllm_runner(
        target,
        env=BOUND,
        speculative_config=spec_of("pard", tmp_path / "pard"),
        tensor_parallel_size=2,
        enable_batch_sharded_sampling=True,
        **ENGINE,
    ) as llm:
        served = llm.generate([first, *others])
    plain, *found = (output.outputs[0] for output in served.outputs)
    assert not plain.logprobs
    for one in found:
        wanted = [{*ids, token} for token in one.token_ids]
        assert [set(row) for row in one.logprobs] == wanted


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_stages(vllm_runner, target, tmp_path, on_cpu, mode: str):
    """The last stage has the whole drafter.

    On a CPU stages with a drafter are refused: in vLLM they require async scheduling,
    which is off there. This test uses the defaults of a GPU.
    """
    requests = requests_of(8, 40)
    with vllm_runner(
        target,
        env=BOUND,
        speculative_config=spec_of(mode, tmp_path / mode),
        pipeline_parallel_size=2,
        async_scheduling=True,
        setup=[take_defaults_of_a_gpu] if on_cpu else [],
        **ENGINE,
    ) as llm:
        served = llm.generate(requests)
        lacks_states = "drafts without the target's hidden states" in llm.log
    assert_output_matches(load_model(target), requests, served)
    assert acceptance(served) > 0.7 or lacks_states
    assert lacks_states is (mode == "pard2")


@pytest.mark.parametrize("schedule", [None, "auto"])
@pytest.mark.parametrize("mode", MODES)
def test_data_parallel(vllm_runner, on_cpu, tmp_path, mode: str, schedule):
    """One rank has few requests, and then runs dummy batches.

    With "auto" the ranks agree on a draft length, which may be 0.
    """
    # Data-parallel ranks run mixtures of experts in lockstep.
    folder = save_target("Qwen3-MoE", tmp_path / "target")
    requests = requests_of(20, 96)
    lengths = {"num_speculative_tokens_per_batch_size": schedule}
    start = partial(
        vllm_runner,
        folder,
        speculative_config=spec_of(mode, tmp_path / mode, 5, **lengths),
        async_scheduling=not on_cpu,
        worker_extension_cls="tests.v1.e2e.exchange.Exchange",
        **ENGINE,  # so few that one rank runs long after the other has finished
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
    assert schedule or acceptance(busy) > 0.7
    assert dummies >= 10


def rank_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": "2",
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
