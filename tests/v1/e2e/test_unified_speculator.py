# SPDX-License-Identifier: Apache-2.0
"""Every kind of drafter on Runner V2: output and drafts equal plain PyTorch's."""

import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from .hooks import attend_to_one_beam, drafter_name, run_dummy_every
from .oracle import (
    HeadOracle,
    ModelOracle,
    Pard2Oracle,
    assert_output_matches,
    compare_drafts,
)
from .recorded import Replays
from .runner import Request, Served
from .watches import Drafts

MAX_MODEL_LEN, BLOCK = 320, 32
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
# prompts, and is smaller than a draft batch; its KV cache holds one request of
# max_model_len. "alone" has a window for drafters.
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "async_scheduling": True,
        "block_size": BLOCK,
    },
    "tiny": {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 1 + MAX_MODEL_LEN // BLOCK,
    },
    "alone": {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 320,
        "enable_prefix_caching": False,
        "block_size": BLOCK,
    },
}
SCENARIOS = {
    "ahead": ("lengths", "again", "aborts"),
    "tiny": ("lengths", "aborts", "preempted"),
    "alone": ("lengths",),
}
# Of "ahead", one after the other: a prompt of more than three blocks, then it with
# another token after these, then the same again; and prompts with a shared prefix,
# computed in the same step, that end at a block boundary or after it. Heads are fed the
# next token with each hidden state, so they do not reuse a block before another token.
HITS = ("blocks", "other blocks", "blocks again", "shared")
DRAFTS = {"ahead": 7, "tiny": 15, "alone": 1}
# Each mode once; the others are slow.
FAST = ("draft-ahead", "pard-tiny", "pard2-tiny", "eagle3-tiny", "peagle-ahead")
TINY_WIDTH = 4  # four passes, the last one narrower
SAMPLING = {"seed": 3, "temperature": 0.8}
Scenarios = dict[str, list[Request]]


def only_fast(names: Iterable[str], *fast: str) -> list[Any]:
    """Parameters for a test; all but `fast` are slow."""
    return [
        name if name in fast else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> Scenarios:
    """Requests that are served at the same time."""
    lengths = [
        Request(make_prompt(length, 0), tokens) for length, tokens in LENGTHS.items()
    ]
    mixed = []
    for i in range(4):
        cut = Request(make_prompt(40, i), 32, abort_after=3 + 4 * i)
        sampling = {} if i else SAMPLING  # its drafts are greedy
        mixed += [cut, Request(make_prompt(40, 9 + i), 24, **sampling)]
    # Two of them fit into the KV cache of "tiny" when they start, but not to their end.
    growing = [Request(make_prompt(120, 70 + i), 60) for i in range(3)]
    text, shared = make_prompt(3 * BLOCK + 1, 5), make_prompt(BLOCK, 6)
    other = [*text[:-1], (text[-1] + 1) % 512]
    alone = [[prompt + text[:8]] for prompt in (text, other, text)]
    same_step = [shared + text[:more] for more in (3, 0, 1)]
    hits = zip(HITS, [*alone, same_step], strict=True)
    return {
        **{name: [Request(prompt, 12) for prompt in each] for name, each in hits},
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


def assert_no_fallback(log: str, method: str, drafts: int, width: int) -> None:
    """Asserts that the log names the speculator, and mentions no fallback."""
    for said in (
        f"method {method}, {drafts} tokens a step, {width} a pass, ",
        f"Unified speculator: passes per step {-(-drafts // width)}, ",
        "Using V2 Model Runner",
    ):
        assert log.count(said) == 1
    # In CUDA graphs the CPU's attention metadata cannot be refreshed.
    log = log.replace("falling back to rebuilding attention metadata", "")
    assert not re.search(
        r"fall(s|ing)? ?back|V1 model runner|Model Runner V1", log, re.I
    )
    assert "Draft probabilities take" not in log  # greedy drafts need none


@pytest.mark.parametrize(
    "case", only_fast(map("-".join, product(MODES, ENGINES)), *FAST)
)
def test_greedy_output_matches_target(
    case: str, vllm_runner, models, target, scenarios: Scenarios
):
    """Ragged and chunked prompts, cache hits, aborts, and the context's end.

    "tiny" also has preemption, and dummy batches of an idle data-parallel rank between
    steps; with the others draft passes are CUDA graphs. One request has a seed. Drafts
    equal those of plain PyTorch.
    """
    mode, engine = case.split("-")
    is_tiny, is_parallel = engine == "tiny", mode in PARALLEL
    drafts, width = DRAFTS[engine], 1
    # A window of the whole context changes no draft.
    more = {"draft_window": MAX_MODEL_LEN} if engine == "alone" else {}
    if is_parallel:
        width = TINY_WIDTH if is_tiny else drafts
        more |= {"parallel_drafting_width": width} if is_tiny else {}
    oracle = oracle_of(mode, models, target)
    names, method = SCENARIOS[engine], MODES[mode]["method"]
    reused = 2 * BLOCK if method == "eagle3" else 3 * BLOCK
    expected_hits = {"blocks": 0, "other blocks": reused, "blocks again": 3 * BLOCK}
    with vllm_runner(
        graphs=not is_tiny,
        speculative_config=speculative(models, mode, drafts, **more),
        max_model_len=MAX_MODEL_LEN,
        **ENGINES[engine],
    ) as llm:
        assert llm.call(drafter_name).endswith("Drafter")
        assert_no_fallback(llm.log, method, drafts, width)
        llm.watch(Drafts)
        if is_tiny:
            llm.call(run_dummy_every, 7)
        for name in names + (HITS if engine == "ahead" else ()):
            asked, served = scenarios[name], llm.generate(scenarios[name])
            assert_output_matches(target, asked, served)
            assert served.count("num_accepted_tokens") > 0
            aborted = [one for one in served.outputs if not one.finished]
            assert len(aborted) == (4 if name == "aborts" else 0)
            every = 1 if name in HITS or engine == "alone" else 8
            texts = served.texts(asked)
            assert compare_drafts(
                served.drafts, texts, oracle, width, every, MAX_MODEL_LEN
            )
            hits = served.count("prefix_cache_hits")
            assert hits == expected_hits.get(name, hits)
            assert hits > 0 or name not in ("again", "shared")
            if name == "preempted":
                assert served.count("num_preemptions") > 0
        if not is_tiny:
            replays, has_later = llm.found(Replays), not is_parallel and drafts > 1
            assert replays["first"] > 0 and (replays["later"] > 0) == has_later


def oracle_of(
    mode: str, models: Path, target: torch.nn.Module
) -> ModelOracle | HeadOracle:
    if mode in ("draft", "pard"):
        return ModelOracle(models / mode, target)
    if mode == "pard2":
        return Pard2Oracle(models / mode, target, (-1, -3))
    return HeadOracle(models / mode, target, (1, 3, 5))


@pytest.mark.parametrize("mode", only_fast(("draft", "pard"), "draft"))
def test_draft_context_shorter_than_target(
    mode: str, vllm_runner, models, target, scenarios
):
    """Past the draft model's context the request continues without drafts."""
    with vllm_runner(
        speculative_config=speculative(models, mode, 7, max_model_len=72),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
    ) as llm:
        lengths = scenarios["lengths"]
        for asked, drafts_any in ((lengths, True), (lengths[-2:], False)):
            served = llm.generate(asked)
            assert_output_matches(target, asked, served)
            assert (served.count("num_draft_tokens") > 0) == drafts_any


# Draft trees.

# By engine: numbers of tree nodes, and depth. "tiny" chunks prompts and preempts,
# "ahead" schedules asynchronously, drafters of "alone" have a narrow window.
TREES = {"ahead": {31: 4, 64: 7}, "tiny": {9: 4, 31: 7}, "alone": {4: 3, 127: 7}}
TREE_CASES = [f"{m}-{e}-{n}" for m in MODES for e in ENGINES for n in TREES[e]]
FAST_TREES = ("pard2-tiny-9", "eagle3-ahead-31")
# Their drafters cannot attend by the masks of several beams.
NARROW = ("draft-alone-4", "eagle3-alone-4")


def second_best(served: Served, depth: int, nodes: int) -> int:
    """Accepted nodes that are second best, after checks of all counters of trees."""
    by_position = served.counters["num_accepted_tokens_per_pos"]
    assert len(by_position) == nodes
    assert by_position[0] > 0 and not any(by_position[depth:])
    by_rank = served.counters["num_accepted_tree_nodes"]
    assert sum(by_rank) <= sum(by_position)  # some chains are verified, too
    assert by_rank[0] > by_rank[1]
    assert served.count("num_tree_nodes") > sum(by_rank)
    return by_rank[1]


@pytest.mark.parametrize("case", only_fast(TREE_CASES, *FAST_TREES))
def test_output_with_trees_matches_target(case, vllm_runner, models, target, scenarios):
    """In the same batches; drafts of trees have no oracle, but their counters agree."""
    mode, engine, number = case.split("-")
    nodes, is_tiny = int(number), engine == "tiny"
    depth, num_second_best = TREES[engine][nodes], 0
    more = {"draft_window": 64} if engine == "alone" else {}
    with vllm_runner(
        speculative_config=speculative(models, mode, depth, draft_tree=nodes, **more),
        max_model_len=MAX_MODEL_LEN,
        setup=[attend_to_one_beam] if case in NARROW else [],
        **ENGINES[engine],
    ) as llm:
        assert ("one node instead of" in llm.log) == (case in NARROW)
        assert "Draft trees are not used" not in llm.log
        if is_tiny:
            llm.call(run_dummy_every, 7)
        for name in SCENARIOS[engine]:
            served = llm.generate(scenarios[name])
            assert_output_matches(target, scenarios[name], served)
            num_second_best += second_best(served, depth, nodes)
    assert num_second_best > 0
    if is_tiny and nodes < 31:  # with room for 31 each, fewer requests run at once
        assert served.count("num_preemptions") > 0
