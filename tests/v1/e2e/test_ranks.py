# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's with two ranks, each on a GPU, or else a core of the CPU.

`test_targets.py` has each kind of drafter with tensor parallel and pipeline stages,
`test_other_vocabulary.py` a draft model with another vocabulary.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm.utils.network_utils import get_open_port

from .oracle import assert_output_matches, load_model
from .runner import BOUND, NUM_DEVICES, Request, Served
from .target_models import SAVE, prompt, save_target
from .test_unified_speculator import MODES
from .watches import Calls

ENGINE = {"max_model_len": 512, "max_num_seqs": 4, "skip_tokenizer_init": True}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NUM_DEVICES < 2, reason="needs two GPUs, or two cores"),
]


def requests_of(number: int, num_tokens: int) -> list[Request]:
    return [Request(prompt(16 + 13 * i), num_tokens) for i in range(number)]


def spec_of(mode: str, folder: Path, drafts: int = 7, **more: Any) -> dict[str, Any]:
    """A drafter that counts."""
    SAVE.get(mode, partial(save_target, "Llama"))(folder)
    spec = {"model": str(folder), "num_speculative_tokens": drafts}
    return spec | MODES[mode] | more


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CPUs gather no int64")
def test_batch_sharded_sampling_returns_requested_logprobs(vllm_runner, tmp_path):
    """Each rank samples half of the requests; all but one ask for two ids' logprobs."""
    ids, (first, *others) = [7, 30], requests_of(4, 20)
    for one in others:
        one.params.logprob_token_ids = ids
    with vllm_runner(
        save_target("Llama", tmp_path / "target"),
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
        place = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": 2, "MASTER_PORT": port}
        env = {f"VLLM_DP_{name}": str(value) for name, value in place.items()}
        llm = start(env=env | {"VLLM_DP_MASTER_IP": "127.0.0.1"})
        llm.watch(Calls, "core", "execute_dummy_batch")
        return llm.generate(part), llm.found(Calls)

    parts = requests[1:], requests[:1]
    with ThreadPoolExecutor() as threads:
        try:
            (busy, _), (idle, dummies) = threads.map(serve, (0, 1), parts, timeout=900)
        finally:  # a rank never ends without the other
            for process in active_children():
                process.kill()
    for part, served in zip(parts, (busy, idle), strict=True):
        assert_output_matches(load_model(folder), part, served)
    accepted, drafts = map(busy.count, ("num_accepted_tokens", "num_drafts"))
    assert schedule or accepted > 0.7 * drafts
    assert dummies >= 10
