# SPDX-License-Identifier: Apache-2.0
"""Every kind of drafter on Runner V2: output and drafts equal plain PyTorch's."""

import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import RunEngine
from .oracle import (
    HeadOracle,
    ModelOracle,
    Pard2Oracle,
    choices,
    compare_drafts,
    seeded_choices,
)

MAX_MODEL_LEN = 320
MODES = {
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model"},
    "pard2": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3"},
}
PARALLEL = ("pard", "pard2", "peagle")
# The last one ends exactly at max_model_len.
LENGTHS = {1: 20, 2: 20, 3: 20, 16: 20, 17: 20, 63: 20, 128: 20, 300: 20}
# Arguments by engine. "ahead" has async scheduling, so drafts are placeholders, some of
# them for drafts that were not made. The token budget of "tiny" leads to chunked
# prompts, and its KV cache holds one request of max_model_len.
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "async_scheduling": True,
    },
    "tiny": {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "block_size": 32,
        "num_gpu_blocks_override": 1 + MAX_MODEL_LEN // 32,
    },
    "alone": {"max_num_seqs": 1, "max_num_batched_tokens": 320},
}
SCENARIOS = {
    "ahead": ("lengths", "again", "aborts"),
    "tiny": ("lengths", "aborts", "preempted"),
    "alone": ("lengths",),
}
DRAFTS = {"ahead": 7, "tiny": 15, "alone": 1}
# Each mode once; the others are slow.
FAST = ("draft-ahead", "pard-tiny", "pard2-tiny", "eagle3-tiny", "peagle-ahead")
TINY_WIDTH = 4  # four passes, the last one narrower
SEEDED = 1  # index of the request in "aborts" that is sampled; its drafts are greedy
SAMPLING = {"seed": 3, "temperature": 0.8}
Requests = list[dict[str, Any]]


def only_fast(names: Iterable[str], *fast: str) -> list[Any]:
    """Parameters for a test; all but `fast` are slow."""
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, Requests]:
    lengths = [
        {"prompt": make_prompt(length, 0), "max_tokens": tokens}
        for length, tokens in LENGTHS.items()
    ]
    aborted = [
        {"prompt": make_prompt(40, seed), "max_tokens": 32, "abort_after": 3 + 4 * seed}
        for seed in range(4)
    ]
    kept = [{"prompt": make_prompt(40, 9 + i), "max_tokens": 24} for i in range(4)]
    mixed = [request for pair in zip(aborted, kept, strict=True) for request in pair]
    mixed[SEEDED]["sampling"] = SAMPLING
    # Two of them fit into the KV cache of "tiny" when they start, but not to their end.
    growing = [{"prompt": make_prompt(120, 70 + i), "max_tokens": 60} for i in range(3)]
    return {
        "lengths": lengths,
        "again": lengths,
        "aborts": mixed,
        "preempted": growing,
    }


def speculative(models, mode: str, drafts: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(models / mode),
        "num_speculative_tokens": drafts,
        **MODES[mode],
        **more,
    }


def assert_output_matches_target(
    result: dict[str, Any], target: torch.nn.Module, scenarios: dict[str, Requests]
) -> None:
    """Asserts that output is that of the target in plain PyTorch, for aborted requests
    up to the abort; that a unified drafter ran; and that no KV block leaked."""
    assert result["drafter"].endswith("Drafter")
    assert result["leaked_blocks"] == 0
    for name, found in result["scenarios"].items():
        asked = zip(scenarios[name], found["tokens"], found["aborted"], strict=True)
        for request, answer, is_cut in asked:
            assert is_cut or len(answer) == request["max_tokens"]
            text, first = request["prompt"] + answer, len(request["prompt"])
            if "sampling" in request:
                assert answer == seeded_choices(target, text, first, **SAMPLING)
            else:
                assert answer == choices(target, text)[first - 1 : -1]


def assert_no_fallback(log: str, method: str, drafts: int, width: int) -> None:
    """Asserts that the log names the speculator, and mentions no fallback."""
    lines = log.splitlines()
    passes = -(-drafts // width)
    for said in (
        f"method {method}, {drafts} tokens a step, {width} a pass, ",
        f"Unified speculator: passes per step {passes}, ",
    ):
        assert sum(said in line for line in lines) == 1
    assert sum("Using V2 Model Runner" in line for line in lines) == 1
    gave_up = [
        line
        for line in lines
        if re.search(r"fall(s|ing)? ?back|V1 model runner|Model Runner V1", line, re.I)
        # Not fallbacks of the speculator: the CPU's attention metadata cannot be
        # refreshed in a CUDA graph, and a tokenizer may lack an unknown token.
        and "rebuilding attention metadata" not in line
        and "VocabMapping" not in line
    ]
    assert gave_up == []
    assert (
        "Draft probabilities take" not in log
    )  # greedy drafts need no memory for them


@pytest.mark.parametrize(
    "case", only_fast(map("-".join, product(MODES, ENGINES)), *FAST)
)
def test_greedy_output_matches_target(
    case: str, run_engine: RunEngine, models, target, scenarios
):
    """Ragged and chunked prompts, cache hits, aborts, and the context's end.

    "tiny" also has preemption, and dummy batches of an idle data-parallel rank between
    steps; with the others draft passes are CUDA graphs. One request has a seed. Drafts
    equal those of plain PyTorch.
    """
    mode, engine = case.split("-")
    is_tiny, is_parallel = engine == "tiny", mode in PARALLEL
    drafts, width, more = DRAFTS[engine], 1, {}
    if is_parallel:
        width = TINY_WIDTH if is_tiny else drafts
        more = {"parallel_drafting_width": width} if is_tiny else {}
    result = run_engine(
        {name: scenarios[name] for name in SCENARIOS[engine]},
        speculative_config=speculative(models, mode, drafts, **more),
        max_model_len=MAX_MODEL_LEN,
        idle_every=7 if is_tiny else 0,
        record_drafts=True,
        record_graphs=not is_tiny,
        **ENGINES[engine],
    )
    assert (result["scheduler"] == "AsyncScheduler") == (engine == "ahead")
    assert_output_matches_target(result, target, scenarios)
    assert_no_fallback(result["log"], MODES[mode]["method"], drafts, width)
    oracle = oracle_of(mode, models, target)
    for name, found in result["scenarios"].items():
        assert found["counters"]["num_accepted_tokens"][0] > 0
        assert sum(found["aborted"]) == (4 if name == "aborts" else 0)
        asked = zip(scenarios[name], found["tokens"], strict=True)
        texts = [request["prompt"] + tokens for request, tokens in asked]
        assert compare_drafts(found["drafts"], texts, oracle, width, 8, MAX_MODEL_LEN)
    if is_tiny:
        assert result["scenarios"]["preempted"]["counters"]["num_preemptions"][0] > 0
        assert result["idle_batches"] > 15
        assert result["touched_kv"] == 0
    else:
        assert result["replays"]["first"] > 0
        has_later = not is_parallel and drafts > 1
        assert (result["replays"]["later"] > 0) == has_later


def oracle_of(
    mode: str, models: Path, target: torch.nn.Module
) -> ModelOracle | HeadOracle:
    if mode in ("draft", "pard"):
        return ModelOracle(models / mode, target)
    if mode == "pard2":
        return Pard2Oracle(models / mode, target, (-1, -3))
    return HeadOracle(models / mode, target, (1, 3, 5))


@pytest.mark.parametrize("mode", only_fast(("pard", "peagle"), "pard"))
def test_smallest_token_budget(
    mode: str, run_engine: RunEngine, models, target, scenarios
):
    """All draft batches are wider than the target's token budget, the last one most."""
    short = {"lengths": scenarios["lengths"][:4]}
    result = run_engine(
        short,
        speculative_config=speculative(models, mode, 7),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=4,
    )
    assert_output_matches_target(result, target, short)


@pytest.mark.parametrize("mode", only_fast(("draft", "pard"), "draft"))
def test_draft_context_shorter_than_target(
    mode: str, run_engine: RunEngine, models, target, scenarios
):
    """Past the draft model's context the request continues without drafts."""
    requests = {"lengths": scenarios["lengths"], "past": scenarios["lengths"][-2:]}
    result = run_engine(
        requests,
        speculative_config=speculative(models, mode, 7, max_model_len=72),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
    )
    assert_output_matches_target(result, target, requests)
    drafts = {
        name: found["counters"]["num_draft_tokens"][0]
        for name, found in result["scenarios"].items()
    }
    assert drafts["lengths"] > 0
    assert drafts["past"] == 0
