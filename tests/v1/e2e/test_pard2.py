# SPDX-License-Identifier: Apache-2.0
"""PARD-2's drafts if the preceding hidden state was computed in an earlier step.

With chunked prompts, cached prefixes (some of them computed in the same step),
preemption and several passes, drafts equal those of plain PyTorch, which computes all
tokens at once.
"""

from typing import Any

import pytest

from tests.checkpoints.families import write_drafter, write_target

from .hooks import drafter_name, run_dummy_every
from .oracle import (
    Pard2Oracle,
    assert_output_matches,
    choices,
    compare_drafts,
    load_model,
)
from .recorded import Replays
from .runner import Request, VllmRunner
from .sessions import Session, answer_sessions
from .watches import Drafts

DRAFTER, TARGET, LAYERS = "pard2-qwen3", "qwen3", (8, 6, 4, 2)
BLOCK, MAX_MODEL_LEN = 32, 160
SHARED = list(range(300, 300 + 2 * BLOCK))
# Suffixes of prompts whose cached prefix ends at, before or after a block boundary.
ENDINGS = ([7, 8, 9], [11] * 40, [])
TOGETHER = [*(SHARED + ending for ending in ENDINGS), SHARED[:33], [5], [9] * 31]
# Two of them fit into the KV cache of "tight" when they start, but not to the end.
GROWING = [list(range(100 * i, 100 * i + 60)) for i in range(1, 4)]
PROMPTS = {"together": TOGETHER, "again": TOGETHER, "growing": GROWING}
# Scenarios and arguments by engine. "wide" computes prompts at once, hits them in the
# prefix cache later, and replays its passes as with CUDA graphs. "tight" computes them
# in chunks, preempts, schedules asynchronously, and drafts in two passes.
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


@pytest.fixture(scope="module")
def folders(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pard2")
    target = write_target(TARGET, folder / "target", models / "target")
    return write_drafter(DRAFTER, folder / "drafter", target), target


@pytest.fixture(scope="module")
def oracle(folders) -> Pard2Oracle:
    drafter, target = folders
    return Pard2Oracle(drafter, load_model(target), LAYERS)


@pytest.fixture
def start(vllm_runner, folders):
    drafter, target = folders

    def start(name: str) -> VllmRunner:
        llm = vllm_runner(
            target,
            graphs=name == "wide",
            speculative_config={"model": str(drafter), **SPECULATIVE[name]},
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            async_scheduling=name == "tight",
            **ENGINES[name],
        )
        assert llm.call(drafter_name) == "Pard2Drafter"
        llm.call(run_dummy_every, 5)
        llm.watch(Drafts)
        return llm

    return start


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_match_single_computation(name: str, start, oracle):
    spec, compared = SPECULATIVE[name], 0
    width = spec.get("parallel_drafting_width", spec["num_speculative_tokens"])
    found = {}
    with start(name) as llm:
        for scenario in SCENARIOS[name]:
            count = 40 if scenario == "growing" else 12
            requests = [Request(prompt, count) for prompt in PROMPTS[scenario]]
            served = found[scenario] = llm.generate(requests)
            assert_output_matches(oracle.target, requests, served)
            texts = served.texts(requests)
            compared += compare_drafts(served.drafts, texts, oracle, width, every=2)
        assert name == "tight" or llm.found(Replays)["first"] > 0
    assert compared > 40
    if name == "wide":
        # The last token of a prompt is always computed.
        assert found["again"].count("prefix_cache_hits") == (2 + 3 + 1 + 1) * BLOCK
    else:
        assert found["growing"].count("num_preemptions") > 0


def test_drafts_of_a_session(start, oracle: Pard2Oracle):
    """Each new part of the prompt replaces the last sampled token.

    Nothing that was kept for that token is used, wherever it is in a block.
    """
    prompts, count = ([[*range(100, 121)], [*range(200, 214)], [7]], [[5], [6, 7]]), 6
    sessions = [Session([Request(part, count) for part in parts]) for parts in prompts]
    with start("wide") as llm:
        served, *_ = llm.call(answer_sessions, sessions)
    texts, replaced = [], set()
    for number, parts in enumerate(prompts):
        tokens, text = served.tokens[number], []
        assert len(tokens) == count * len(parts)
        for at, part in enumerate(parts):
            prompt, answer = text[:-1] + part, tokens[at * count : (at + 1) * count]
            text = prompt + answer
            assert answer == choices(oracle.target, text)[len(prompt) - 1 : -1]
            replaced.add((number, len(text)))
        texts.append(text)
    kept = [row for row in served.drafts if row[:2] not in replaced]
    assert compare_drafts(kept, texts, oracle, width=5) > 10
