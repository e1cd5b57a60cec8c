# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Runner V2: output equals the target's in any batch."""

import pytest

from .hooks import attend_to_one_beam, run_dummy_every
from .oracle import assert_output_matches
from .runner import Request, Served
from .test_unified_speculator import (
    ENGINES,
    MAX_MODEL_LEN,
    SCENARIOS,
    only_fast,
    scenarios,  # noqa: F401  (a fixture)
    speculative,
)

MODES = ("pard", "pard2", "peagle", "draft", "eagle3")
# By engine: numbers of tree nodes, and depth. "tiny" chunks prompts and preempts,
# "ahead" schedules asynchronously.
TREES = {"ahead": {31: 4, 64: 7}, "tiny": {9: 4, 31: 7}, "alone": {4: 3, 127: 7}}
CASES = [f"{m}-{e}-{nodes}" for m in MODES for e in ENGINES for nodes in TREES[e]]
FAST = ("pard2-tiny-9", "eagle3-ahead-31")


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


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_output_matches_target(case, vllm_runner, models, target, scenarios):  # noqa: F811
    """Ragged and chunked prompts, cache hits, aborts, a seed, and the context's end.

    "tiny" also has preemption, and dummy batches of an idle data-parallel rank.
    """
    mode, engine, number = case.split("-")
    nodes, is_tiny = int(number), engine == "tiny"
    depth, num_second_best = TREES[engine][nodes], 0
    with vllm_runner(
        speculative_config=speculative(models, mode, depth, draft_tree=nodes),
        max_model_len=MAX_MODEL_LEN,
        **ENGINES[engine],
    ) as llm:
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


@pytest.mark.parametrize("mode", only_fast(("eagle3", "draft")))
def test_one_beam_where_the_drafter_cannot_attend_to_more(
    vllm_runner, models, target, make_prompt, mode: str
):
    requests = [Request(make_prompt(30 + i, i), 40) for i in range(6)]
    found = []
    for setup in ([], [attend_to_one_beam]):
        spec = speculative(models, mode, 6, draft_tree=31)
        with vllm_runner(
            speculative_config=spec, max_model_len=128, max_num_seqs=4, setup=setup
        ) as llm:
            assert ("one node instead of 4" in llm.log) == bool(setup)
            served = llm.generate(requests)
        assert_output_matches(target, requests, served)
        found.append(served.count("num_accepted_tokens") / served.count("num_drafts"))
    assert found[0] > 1.02 * found[1]
