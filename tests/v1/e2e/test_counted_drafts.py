# SPDX-License-Identifier: Apache-2.0
"""Counters and metrics of requests agree, and count the tokens that were received."""

from typing import Any

import pytest

from .conftest import RunEngine
from .oracle import choices
from .test_unified_speculator import only_fast, speculative

K, N = 5, 15
REFUSES = {"extra_args": {"disable_spec_decode": True}}
GRAMMAR = {"structured_outputs": {"regex": "[a-z ]{1,30}"}, "ignore_eos": False}
# A request that penalizes tokens verifies the chain of its tree.
PENALTY = {"presence_penalty": 0.5}
WAYS = {
    "chains": {},
    "async": {"async_scheduling": True},
    "trees": {"draft_tree": N},
    "async trees": {"draft_tree": N, "async_scheduling": True},
    "changing": {"num_speculative_tokens_per_batch_size": [[1, 4, K], [5, 8, 2]]},
    "sampled": {"draft_sample_method": "probabilistic"},
}
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "structured_outputs_config": {"backend": "xgrammar"},
    "per_request_spec_decode_metrics": "summary",
}


def requests_of(make_prompt) -> list[dict[str, Any]]:
    lengths = {2: {}, 3: {}, 4: {}, 40: REFUSES, 41: {}, 42: PENALTY, 43: GRAMMAR}
    return [
        {"prompt": make_prompt(20 + n, n), "max_tokens": n, "sampling": sampling}
        for n, sampling in lengths.items()
    ]


@pytest.mark.parametrize("way", only_fast(WAYS, "trees", "async"))
@pytest.mark.parametrize("mode", only_fast(("pard", "eagle3"), "pard"))
def test_metrics_of_requests_add_up(
    mode: str, way: str, run_engine: RunEngine, models, make_prompt
):
    how = dict(WAYS[way])
    is_async = how.pop("async_scheduling", False)
    spec = speculative(models, mode, K, **how)
    asked = {"all": requests_of(make_prompt)}
    how = {"speculative_config": spec, "async_scheduling": is_async}
    found = run_engine(asked, **how, **ENGINE)["scenarios"]["all"]
    counters, metrics = found["counters"], [one for (one,) in found["metrics"]]
    assert {one["num_spec_tokens"] for one in metrics} == {K}
    sums = {
        "num_drafts": "num_spec_steps",
        "num_draft_tokens": "num_draft_tokens",
        "num_accepted_tokens": "num_accepted_draft_tokens",
    }
    for counter, name in sums.items():
        assert counters[counter][0] == sum(one[name] for one in metrics)
    for one, tokens, request in zip(
        metrics, found["tokens"], asked["all"], strict=True
    ):
        if request["sampling"] == REFUSES:
            assert one["num_spec_steps"] == one["num_draft_tokens"] == 0
        elif request["sampling"] != GRAMMAR:
            # The prompt's step has no drafts.
            steps, accepted = one["num_spec_steps"], one["num_accepted_draft_tokens"]
            assert len(tokens) == 1 + steps + accepted


@pytest.mark.parametrize(
    "max_tokens, drafts", [pytest.param(2, 0, marks=pytest.mark.slow), (3, 1)]
)
def test_auto_drafts_no_more_than_short_answers_receive(
    max_tokens: int, drafts: int, run_engine: RunEngine, models, make_prompt
):
    """Though all is accepted: the target is its own drafter."""
    spec = {
        "model": str(models / "target"),
        "method": "draft_model",
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": "auto",
    }
    asked = [
        {"prompt": make_prompt(16, n), "max_tokens": max_tokens, "arrives": n // 4 * 3}
        for n in range(80)
    ]
    how = {"speculative_config": spec, "made_up_times": True, "max_num_seqs": 4}
    result = run_engine({"learn": asked, "later": asked}, max_model_len=64, **how)
    steps = result["scenarios"]["later"]["counters"]["num_steps"]
    assert steps[drafts] > 0.7 * sum(steps)


@pytest.mark.parametrize("mode", ["pard", "eagle3"])
def test_prompt_embeddings(
    mode: str, run_engine: RunEngine, models, target, make_prompt
):
    """Output is the target's, and a drafter that sees tokens alone is reported once."""
    asked = [
        {"prompt": make_prompt(20 + n, n), "max_tokens": 30, "embeds": True}
        for n in range(3)
    ]
    spec = speculative(models, mode, K)
    how = {"speculative_config": spec, "enable_prompt_embeds": True}
    result = run_engine({"all": asked}, max_model_len=128, **how)
    found = result["scenarios"]["all"]
    for request, tokens in zip(asked, found["tokens"], strict=True):
        prompt = request["prompt"]
        assert tokens == choices(target, prompt + tokens)[len(prompt) - 1 : -1]
    assert found["counters"]["num_accepted_tokens"][0] > 0
    lines = result["log"].count("Requests with prompt embeddings: the drafter does not")
    assert lines == (mode == "pard")
