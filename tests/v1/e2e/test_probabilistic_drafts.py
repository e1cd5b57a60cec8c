# SPDX-License-Identifier: Apache-2.0
"""Probabilistic drafts: seeds, mixed batches, and the distribution that verifies them.

Seeded requests must give the target's own tokens, like greedy ones, whatever else is in
the batch: here chunked prompts, requests that wait, and preemption.
"""

from typing import Any

import pytest

from .conftest import RunEngine
from .test_unified_speculator import MODES, only_fast, speculative

DRAFTS = 4
AHEAD = ("pard", "eagle3")  # steps scheduled before the last one's tokens are known
REPLAYED = ("draft", "pard")  # draft passes are CUDA graphs, emulated on a CPU
ENGINE: dict[str, Any] = {
    "max_model_len": 160,
    "enable_prefix_caching": False,
    "block_size": 32,
}
ROOMY = {"max_num_seqs": 16, "max_num_batched_tokens": 512}
# Prompts are chunked, some drafts are cut, and the KV cache holds 320 tokens. Seven
# requests with drafts use up the budget, so an eighth one waits with its drafts.
TIGHT = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 35,
    "num_gpu_blocks_override": 11,
}
# Greedy or seeded: the output is determined by the target alone.
SETTLED: list[dict[str, Any]] = [
    {},
    {"seed": 7, "temperature": 1.0, "logprobs": 3},
    {"seed": 8, "temperature": 0.3, "logprobs": 0},
    {"seed": 9, "temperature": 2.0, "top_k": 20},
    {"seed": 10, "temperature": 1.0, "top_p": 0.8, "n": 2},
    {"seed": 11, "temperature": 1.5, "min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
    {"frequency_penalty": 1.0, "logit_bias": {"40": 4.0, "300": -8.0}},
    {"seed": 12, "temperature": 0.8, "frequency_penalty": 0.7},
]
UNSETTLED = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
ALONE = 1  # index of the one of SETTLED that also runs alone


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[dict[str, Any]]]:
    def request(number: int, sampling: dict[str, Any], length: int, tokens: int):
        prompt = make_prompt(length, 200 + number)
        return {"prompt": prompt, "max_tokens": tokens, "sampling": sampling}

    mixed = [
        request(i, sampling, 12 + 9 * (i % 4), 10) for i, sampling in enumerate(SETTLED)
    ]
    # Once they grow past three blocks, only two fit into the KV cache of TIGHT.
    growing = [
        request(20 + i, {"seed": i, "temperature": 0.6}, 92, 18) for i in range(3)
    ]
    crowded = [request(40 + i, {"seed": 40 + i}, 3, 5 + i) for i in range(8)]
    unsettled = [
        request(30 + i, sampling, 20, 10) for i, sampling in enumerate(UNSETTLED)
    ]
    return {
        "mixed": mixed + unsettled,
        "alone": mixed[ALONE : ALONE + 1],
        "preempted": growing,
        "crowded": crowded,
    }


@pytest.fixture(scope="module")
def expected(once, run_engine: RunEngine, scenarios) -> dict[str, dict[str, list[Any]]]:
    """Output of the target without drafts."""
    wanted = scenarios | {"mixed": scenarios["mixed"][: len(SETTLED)]}
    del wanted["alone"]
    found = once("sampled", lambda: run_engine(wanted, **ENGINE, **ROOMY)["scenarios"])
    keys = ("all_tokens", "logprobs")
    alone = {key: found["mixed"][key][ALONE : ALONE + 1] for key in keys}
    return found | {"alone": alone}


@pytest.mark.parametrize("mode", only_fast(MODES, "draft", "pard"))
def test_greedy_and_seeded_output_matches_target(
    mode: str, run_engine: RunEngine, models, scenarios, expected
):
    """Also checks that each draft is verified against its own distribution."""
    spec = speculative(models, mode, DRAFTS, draft_sample_method="probabilistic")
    is_ahead, is_replayed = mode in AHEAD, mode in REPLAYED
    result = run_engine(
        scenarios,
        speculative_config=spec,
        async_scheduling=is_ahead,
        record_graphs=is_replayed,
        keep_drafts=True,
        **ENGINE,
        **TIGHT,
    )
    assert (result["scheduler"] == "AsyncScheduler") == is_ahead
    assert not is_replayed or result["replays"]["first"] > 0
    kept = result["kept"]
    assert kept["verified"] > 100 and kept["waited"] > 0 and kept["moved"] > 0
    assert kept["strange"] == kept["undrawn"] == 0
    assert total(result, "num_preemptions") > 0
    assert total(result, "num_accepted_tokens") > 10
    assert "Draft probabilities take" in result["log"]
    for name, wanted in expected.items():
        count = len(wanted["all_tokens"])
        assert result["scenarios"][name]["all_tokens"][:count] == wanted["all_tokens"]
        found = result["scenarios"][name]["logprobs"]
        for ours, target in zip(found, wanted["logprobs"], strict=False):
            assert ours == [values and approximately(values) for values in target]
    likeliest = result["scenarios"]["alone"]["logprobs"][0][0][0]
    assert 3 <= len(likeliest) <= 4  # the sampled token need not be one of them


def total(result: dict[str, Any], counter: str) -> int:
    return sum(found["counters"][counter][0] for found in result["scenarios"].values())


def approximately(values: list[dict[str, float]]) -> list[Any]:
    """The same ids, and nearly the same logprobs, at every position."""
    return [pytest.approx(of_place, abs=1e-3) for of_place in values]


def test_seeded_output_does_not_depend_on_draft_length(
    run_engine: RunEngine, models, scenarios, expected
):
    """With greedy drafts, fewer for larger batches, and block verification."""
    wanted = {"mixed": scenarios["mixed"]}
    spec = speculative(
        models,
        "pard",
        DRAFTS,
        num_speculative_tokens_per_batch_size=[[1, 2, DRAFTS], [3, 4, 2], [5, 16, 1]],
        rejection_sample_method="block",
    )
    result = run_engine(wanted, speculative_config=spec, **ENGINE, **ROOMY)
    assert total(result, "num_accepted_tokens") > 0
    found = result["scenarios"]["mixed"]["all_tokens"]
    assert found[: len(SETTLED)] == expected["mixed"]["all_tokens"]
