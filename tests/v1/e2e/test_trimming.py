# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's if only the likeliest drafts of a batch are verified."""

from typing import Any

import pytest
import torch

from .conftest import RunEngine
from .test_unified_speculator import (
    MODES,
    SAMPLING,
    assert_output_matches_target,
    only_fast,
    speculative,
)

DRAFTS = 7
ADAPTIVE = {"enable_adaptive_verification": True}
# With one draft for each there are more rows than the knee of the made-up times.
NUM_REQUESTS = 14
ENGINE = {
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 256,
    "max_model_len": 320,
}


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[dict[str, Any]]]:
    """Enough requests for trimming, one of them with a seed; and too few."""
    full = [
        {"prompt": make_prompt(20 + i, i), "max_tokens": 40}
        for i in range(NUM_REQUESTS)
    ]
    full[3]["sampling"] = SAMPLING
    return {"full": full, "few": full[:2]}


@pytest.fixture
def run(run_engine: RunEngine, models, scenarios):
    def run(mode: str, **spec: Any) -> dict[str, Any]:
        how = {name: spec.pop(name) for name in ("async_scheduling",) if name in spec}
        spec = speculative(models, mode, DRAFTS, **ADAPTIVE, **spec)
        fakes = {"made_up_times": True, "record_graphs": True}
        return run_engine(scenarios, speculative_config=spec, **fakes, **how, **ENGINE)

    return run


@pytest.mark.parametrize("mode", only_fast(MODES, "pard"))
def test_fixed_length(mode: str, run, target, scenarios):
    result = run(mode, async_scheduling=mode == "pard")
    assert_output_matches_target(result, target, scenarios)
    found = {name: each["counters"] for name, each in result["scenarios"].items()}
    drafts, verified = (
        {name: each[counter][0] for name, each in found.items()}
        for counter in ("num_drafts", "num_draft_tokens")
    )
    assert 0 < verified["full"] < 0.9 * DRAFTS * drafts["full"]
    assert found["full"]["num_accepted_tokens"][0] > 0
    assert verified["few"] == DRAFTS * drafts["few"]
    assert min(result["replays"]["first"], result["replays"]["ragged"]) > 0


@pytest.mark.parametrize("mode", only_fast(("eagle3", "peagle"), "eagle3"))
def test_auto_length(mode: str, run, target, scenarios):
    result = run(mode, num_speculative_tokens_per_batch_size="auto")
    assert_output_matches_target(result, target, scenarios)
    assert min(result["replays"]["first"], result["replays"]["ragged"]) > 0


# Steps with trees, between steps with chains, which are trimmed. Requests are preempted
# sometimes, so that the remaining ones are too few to trim.
TREES = {"pard": (11, 15), "pard2": (23, 31), "peagle": (11, 15)}
TREES |= {"eagle3": (11, 15), "draft": (19, 11)}
# KV cache blocks of 32 tokens: eight requests start, with room for the largest tree.
CROWDED = {"pard": 22, "pard2": 26, "peagle": 22, "eagle3": 22, "draft": 24}


@pytest.mark.parametrize("mode", only_fast(TREES, "pard"))
def test_alternating_trees_and_trimmed_chains(
    mode: str, run_engine: RunEngine, models, target, make_prompt
):
    """One request has a seed, one can only use chains, one asks for logprobs."""
    asked = [{"prompt": make_prompt(36 + i, i), "max_tokens": 36} for i in range(8)]
    asked[3]["sampling"] = SAMPLING
    scenarios = {"all": [*asked]}
    # A word that does not occur in the output anyway.
    asked[4] = asked[4] | {"sampling": {"bad_words": ["zebra"]}}
    asked[5] = asked[5] | {"sampling": {"logprobs": 1}}
    result = run_engine(
        {"all": asked},
        speculative_config={"model": str(models / mode), **ADAPTIVE},
        defaults_of_a_gpu=True,
        made_up_times=True,
        record_graphs=True,
        drafts_by_turns=[7, 7, 7, *TREES[mode], 7, 2],
        async_scheduling=mode == "pard",
        num_gpu_blocks_override=CROWDED[mode],
        **ENGINE | {"max_num_seqs": 8, "block_size": 32},
    )
    assert_output_matches_target(result, target, scenarios)
    answers = result["scenarios"]["all"]
    text = asked[5]["prompt"] + answers["tokens"][5]
    with torch.inference_mode():
        logits = target(torch.tensor([text])).logits[0, len(asked[5]["prompt"]) - 1 :]
    best = logits[:-1].log_softmax(-1).amax(-1).tolist()
    (told,) = answers["logprobs"][5]
    assert [max(row.values()) for row in told] == pytest.approx(best, abs=1e-3)
    found = answers["counters"]
    assert found["num_tree_nodes"][0] > 0
    assert result["replays"]["ragged"] > 0
    assert found["num_preemptions"][0] > 0
