# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Runner V2: output equals the target's in any batch."""

import pytest

from .hooks import attend_to_one_beam, run_dummy_every
from .oracle import assert_output_matches
from .runner import Served
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
# "ahead" schedules asynchronously, drafters of "alone" have a narrow window.
TREES = {"ahead": {31: 4, 64: 7}, "tiny": {9: 4, 31: 7}, "alone": {4: 3, 127: 7}}
CASES = [f"{m}-{e}-{nodes}" for m in MODES for e in ENGINES for nodes in TREES[e]]
FAST = ("pard2-tiny-9", "eagle3-ahead-31")
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


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_output_matches_target(case, vllm_runner, models, target, scenarios):  # noqa: F811
    """Ragged and chunked prompts, cache hits, aborts, a seed, and the context's end.

    "tiny" also has preemption, and dummy batches of an idle data-parallel rank.
    """
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
