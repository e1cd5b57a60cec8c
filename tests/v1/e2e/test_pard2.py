# SPDX-License-Identifier: Apache-2.0
"""PARD-2's drafts, where the state before a step's tokens is not in that step.

Prompts in chunks, cached prefixes (some of them computed in the same step), preemption
and several passes: the drafts are those of plain PyTorch, which computes all at once.
"""

from typing import Any

import pytest

from tests.checkpoints.families import TARGETS, write_drafter, write_target

from .fed_rows import place
from .oracle import Pard2Oracle, load_model, same_as_alone

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

# What is fed is compared bit by bit: prompts at once and cached, or in chunks.
FED = {
    "at once": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    "in chunks": {"max_num_batched_tokens": 24, "max_num_seqs": 3},
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


def num_cached(found: dict[str, Any]) -> int:
    """Prompt tokens of a scenario that were not computed again."""
    return found["counters"]["prefix_cache_hits"][0]


@pytest.fixture(scope="module")
def oracle(folders) -> Pard2Oracle:
    drafter, target = folders
    return Pard2Oracle(drafter, load_model(target), LAYERS)


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_are_those_of_one_computation(name: str, folders, run_job, oracle):
    result = run_job(engine_job(name, *map(str, folders)))
    spec = SPECULATIVE[name]
    assert "error" not in result, result["error"]
    assert result["drafter"] == "Pard2Drafter"
    assert result["idle_batches"] > 0 and result["touched_kv"] == 0
    width = spec.get("parallel_drafting_width", spec["num_speculative_tokens"])
    scenarios, compared = result["scenarios"], 0
    for scenario, found in scenarios.items():
        prompts = PROMPTS[scenario]
        texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
        same_as_alone(oracle.target, prompts, found["tokens"])
        for request, known, drafts in found["drafts"][::2]:
            text = texts[int(request)]
            if known <= len(text):
                wanted = oracle.drafts(text[:known], len(drafts), width)
                assert drafts == wanted, f"request {request} after {known} tokens"
                compared += 1
    assert compared > 40
    if name == "wide":
        assert result["replays"]["first"] > 0
        # The prompt's last token is computed in any case.
        assert num_cached(scenarios["again"]) == (2 + 3 + 1 + 1) * BLOCK
    else:
        assert scenarios["growing"]["counters"]["num_preemptions"][0] > 0


def test_drafts_of_a_session(folders, run_job, oracle: Pard2Oracle):
    """A part of the prompt takes the place of the last token that was sampled.

    Of what was laid out for that token nothing is left, wherever in a block it stands.
    """
    sessions, count = ([[*range(100, 121)], [*range(200, 214)], [7]], [[5], [6, 7]]), 6
    job = engine_job("wide", *map(str, folders))
    job["scenarios"] = {
        "sessions": [
            {"prompt": first, "then": then, "max_tokens": count, "stream": True}
            for first, *then in sessions
        ]
    }
    result = run_job(job)
    assert "error" not in result, result["error"]
    found, compared = result["scenarios"]["sessions"], 0
    for number, parts in enumerate(sessions):
        tokens, known = found["tokens"][number], []
        assert len(tokens) == count * len(parts)
        made = {n: drafts for at, n, drafts in found["drafts"] if int(at) == number}
        for at, part in enumerate(parts):
            prompt, answer = known + part, tokens[at * count : (at + 1) * count]
            same_as_alone(oracle.target, [prompt], [answer])
            for i in range(1, count + 1):
                text = prompt + answer[:i]
                if drafts := made.get(len(text)):
                    assert drafts == oracle.drafts(text, len(drafts), len(drafts)), at
                    compared += 1
            known = prompt + answer[:-1]
    assert compared > 10


@pytest.mark.parametrize("name", FED)
def test_slots_are_fed_the_same_bits(name: str, folders, run_job):
    """At once, in chunks or behind a cached prefix: the state of the token before."""
    job = engine_job("wide", *map(str, folders))
    prompts = [*TOGETHER[:2], SHARED[:33]]
    requests = [{"prompt": prompt, "max_tokens": 6} for prompt in prompts]
    job["engine"] |= FED[name]
    job["scenarios"] = {"first": requests, "again": requests}
    recorded = {"record_fed": True, "record_drafts": False, "record_graphs": False}
    result = run_job(job | recorded)
    assert "error" not in result, result["error"]
    first, again = (result["scenarios"][name] for name in ("first", "again"))
    for found in (first, again):
        assert fed_as_defined(found, prompts) >= num_slots(found, prompts)
    assert num_cached(again) == (2 + 3 + 1) * BLOCK


def num_slots(found: dict[str, Any], prompts: list[list[int]]) -> int:
    """The fewest slots fed: an answer's last step drafts for nobody."""
    accepted = found["counters"]["num_accepted_tokens"][0]
    drafting = sum(len(tokens) - 1 for tokens in found["tokens"]) - accepted
    computed = sum(map(len, prompts)) - num_cached(found)
    return computed + drafting * SPECULATIVE["wide"]["num_speculative_tokens"]


def fed_as_defined(found: dict[str, Any], prompts: list[list[int]]) -> int:
    """Tokens are fed the state before them, masks that of the next token; how many."""
    width, checked = TARGETS[TARGET]["hidden_size"], 0
    texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
    for request, position, next_token, fed in found["fed"]:
        text, before = texts[int(request)], min(position, next_token) - 1
        if before < len(text):
            wanted = -1 if before < 0 else place(text[before], before, width)
            assert fed == wanted, f"request {request}, slot at {position}"
            checked += 1
    return checked
