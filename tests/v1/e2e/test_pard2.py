# SPDX-License-Identifier: Apache-2.0
"""PARD-2's drafts if the preceding hidden state was computed in an earlier step.

With chunked prompts, cached prefixes (some of them computed in the same step),
preemption and several passes, drafts equal those of plain PyTorch, which computes all
tokens at once.
"""

from typing import Any

import pytest

from tests.checkpoints.families import write_drafter, write_target

from .conftest import RunEngine
from .oracle import (
    Pard2Oracle,
    assert_greedy_output_matches,
    compare_drafts,
    load_model,
)

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


def run(run_engine: RunEngine, folders, name: str, scenarios) -> dict[str, Any]:
    drafter, target = folders
    return run_engine(
        scenarios,
        model=target,
        speculative_config={"model": str(drafter), **SPECULATIVE[name]},
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK,
        async_scheduling=name == "tight",
        idle_every=5,
        record_drafts=True,
        record_graphs=name == "wide",
        **ENGINES[name],
    )


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_match_single_computation(name: str, folders, run_engine, oracle):
    def requests(prompts: list[list[int]]) -> list[dict[str, Any]]:
        tokens = 40 if prompts is GROWING else 12
        return [{"prompt": prompt, "max_tokens": tokens} for prompt in prompts]

    asked = {each: requests(PROMPTS[each]) for each in SCENARIOS[name]}
    result = run(run_engine, folders, name, asked)
    assert result["drafter"] == "Pard2Drafter"
    assert result["idle_batches"] > 0 and result["touched_kv"] == 0
    spec, compared = SPECULATIVE[name], 0
    width = spec.get("parallel_drafting_width", spec["num_speculative_tokens"])
    for scenario, found in result["scenarios"].items():
        prompts = PROMPTS[scenario]
        texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
        assert_greedy_output_matches(oracle.target, prompts, found["tokens"])
        compared += compare_drafts(found["drafts"], texts, oracle, width, every=2)
    assert compared > 40
    counters = {each: found["counters"] for each, found in result["scenarios"].items()}
    if name == "wide":
        assert result["replays"]["first"] > 0
        # The last token of a prompt is always computed.
        assert counters["again"]["prefix_cache_hits"][0] == (2 + 3 + 1 + 1) * BLOCK
    else:
        assert counters["growing"]["num_preemptions"][0] > 0


def test_drafts_of_a_session(folders, run_engine, oracle: Pard2Oracle):
    """Each new part of the prompt replaces the last sampled token.

    Nothing that was kept for that token is used, wherever it is in a block.
    """
    sessions, count = ([[*range(100, 121)], [*range(200, 214)], [7]], [[5], [6, 7]]), 6
    requests = [
        {
            "prompt": first,
            "then": [{"prompt": part} for part in then],
            "max_tokens": count,
            "stream": True,
        }
        for first, *then in sessions
    ]
    result = run(run_engine, folders, "wide", {"sessions": requests})
    found, texts, replaced = result["scenarios"]["sessions"], [], set()
    for number, parts in enumerate(sessions):
        tokens, text = found["tokens"][number], []
        assert len(tokens) == count * len(parts)
        for at, part in enumerate(parts):
            prompt, answer = text[:-1] + part, tokens[at * count : (at + 1) * count]
            assert_greedy_output_matches(oracle.target, [prompt], [answer])
            text = prompt + answer
            replaced.add((number, len(text)))
        texts.append(text)
    kept = [row for row in found["drafts"] if (int(row[0]), row[1]) not in replaced]
    assert compare_drafts(kept, texts, oracle, width=5) > 10
