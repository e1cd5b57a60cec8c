# SPDX-License-Identifier: Apache-2.0
"""Draft trees on Runner V2: output equals the target's in any batch."""

import pytest

from .test_unified_speculator import (
    ENGINES,
    MAX_MODEL_LEN,
    SCENARIOS,
    assert_output_matches_target,
    only_fast,
    scenarios,  # noqa: F401  (a fixture)
    speculative,
)

MODES = ("pard", "pard2", "peagle", "draft", "eagle3")
# By engine: numbers of tree nodes, and depth. "tiny" chunks prompts and preempts,
# "ahead" schedules asynchronously.
TREES = {"ahead": {31: 4, 64: 7}, "tiny": {9: 4, 31: 7}, "alone": {4: 3, 127: 7}}
CASES = [f"{m}-{e}-{nodes}" for m in MODES for e in ENGINES for nodes in TREES[e]]
FAST = ("pard-ahead-31", "pard2-tiny-9", "draft-tiny-9", "eagle3-ahead-31")


def assert_trees_were_verified(result, depth: int, nodes: int) -> None:
    num_second_best = 0
    for found in result["scenarios"].values():
        counted = found["counters"]
        by_position = counted["num_accepted_tokens_per_pos"]
        assert len(by_position) == nodes
        assert by_position[0] > 0 and not any(by_position[depth:])
        by_rank = counted["num_accepted_tree_nodes"]
        assert sum(by_rank) <= sum(by_position)  # some chains are verified, too
        assert by_rank[0] > by_rank[1]
        num_second_best += by_rank[1]
        assert counted["num_tree_nodes"][0] > sum(by_rank)
    assert num_second_best > 0
    assert "Draft trees are not used" not in result["log"]


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_output_matches_target(case, run_engine, models, target, scenarios):  # noqa: F811
    """Ragged and chunked prompts, cache hits, aborts, a seed, and the context's end.

    "tiny" also has preemption, and dummy batches of an idle data-parallel rank, which
    must not change the KV cache.
    """
    mode, engine, number = case.split("-")
    nodes, is_tiny = int(number), engine == "tiny"
    depth = TREES[engine][nodes]
    result = run_engine(
        {name: scenarios[name] for name in SCENARIOS[engine]},
        speculative_config=speculative(models, mode, depth, draft_tree=nodes),
        max_model_len=MAX_MODEL_LEN,
        idle_every=7 if is_tiny else 0,
        **ENGINES[engine],
    )
    assert_output_matches_target(result, target, scenarios)
    assert_trees_were_verified(result, depth, nodes)
    if is_tiny and nodes < 31:  # with room for 31 each, fewer requests run at once
        assert result["scenarios"]["preempted"]["counters"]["num_preemptions"][0] > 0
        assert result["touched_kv"] == 0


# Requests whose logits processing depends on preceding tokens verify a chain.
DEPENDENT = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "bad words": {"bad_words": ["self", "def"]},
    "grammar": {"structured_outputs": {"regex": "(self|cls)[.]([a-z_]{2,9})[(][)]"}},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 2},
    "least tokens": {"min_tokens": 12, "stop_token_ids": [5]},
}


def test_output_that_depends_on_preceding_tokens_matches_target(
    run_engine, models, make_prompt
):
    """In batches with trees, compared with the same engine without drafts."""
    requests = [
        {"prompt": make_prompt(24, 30 + i), "max_tokens": 20, "sampling": sampling}
        for i, sampling in enumerate(DEPENDENT.values())
    ]
    requests += [{"prompt": make_prompt(24, 40 + i), "max_tokens": 20} for i in (0, 1)]
    # Fewer tokens a step than 8 trees have nodes, so fewer rows of grammar masks.
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "max_model_len": 128}

    def answers(speculative_config):
        asked = {"all": requests, "chains": requests[:2]}
        return run_engine(asked, speculative_config=speculative_config, **engine)

    tree = speculative(models, "pard", 4, draft_tree=15)
    found, wanted = (answers(each)["scenarios"] for each in (tree, None))
    assert all(found[each]["tokens"] == wanted[each]["tokens"] for each in wanted)
    # A verified chain does not count as nodes of a tree.
    chains = found["chains"]["counters"]
    drafts, tokens = (chains[f"num_{what}"][0] for what in ("drafts", "draft_tokens"))
    assert drafts < tokens <= 4 * drafts and chains["num_tree_nodes"] == [0]
    assert found["all"]["counters"]["num_tree_nodes"] > [0]
