# SPDX-License-Identifier: Apache-2.0
"""Probabilistic drafts: seeds, mixed batches, and the distribution that verifies them.

Seeded requests must give the target's own tokens, like greedy ones, whatever else is in
the batch: here chunked prompts, requests that wait, and preemption.
"""

from typing import Any

import pytest

from vllm.outputs import CompletionOutput

from .recorded import Replays
from .runner import Request, Served
from .test_unified_speculator import MODES, only_fast, speculative
from .watches import KeptDrafts

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
    {"frequency_penalty": 1.0, "logit_bias": {40: 4.0, 300: -8.0}},
    {"seed": 12, "temperature": 0.8, "frequency_penalty": 0.7},
]
UNSETTLED = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
ALONE = 1  # index of the one of SETTLED that also runs alone


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[Request]]:
    def make(number: int, sampling: dict[str, Any], length: int, tokens: int):
        return Request(make_prompt(length, 200 + number), tokens, **sampling)

    mixed = [
        make(i, sampling, 12 + 9 * (i % 4), 10) for i, sampling in enumerate(SETTLED)
    ]
    unsettled = [make(30 + i, each, 20, 10) for i, each in enumerate(UNSETTLED)]
    return {
        "mixed": mixed + unsettled,
        "alone": mixed[ALONE : ALONE + 1],
        # Once they grow past three blocks, only two fit into the KV cache of TIGHT;
        # they go on for long, however many drafts are accepted.
        "preempted": [
            make(20 + i, {"seed": i, "temperature": 0.6}, 92, 40) for i in range(3)
        ],
        "crowded": [make(40 + i, {"seed": 40 + i}, 3, 5 + i) for i in range(8)],
    }


@pytest.fixture(scope="module")
def expected(once, vllm_runner, scenarios) -> dict[str, Served]:
    """Output of the target without drafts."""

    def serve() -> dict[str, Served]:
        with vllm_runner(**ENGINE, **ROOMY) as llm:
            settled = scenarios | {"mixed": scenarios["mixed"][: len(SETTLED)]}
            return {name: llm.generate(asked) for name, asked in settled.items()}

    return once("sampled", serve)


@pytest.mark.parametrize("mode", only_fast(MODES, "draft", "pard"))
def test_greedy_and_seeded_output_matches_target(
    mode: str, vllm_runner, models, scenarios, expected
):
    """Also checks that each draft is verified against its own distribution."""
    is_replayed = mode in REPLAYED
    with vllm_runner(
        graphs=is_replayed,
        speculative_config=speculative(
            models, mode, DRAFTS, draft_sample_method="probabilistic"
        ),
        async_scheduling=mode in AHEAD,
        **ENGINE,
        **TIGHT,
    ) as llm:
        assert "Draft probabilities take" in llm.log
        llm.watch(KeptDrafts)
        found = {name: llm.generate(asked) for name, asked in scenarios.items()}
        assert not is_replayed or llm.found(Replays)["first"] > 0
        kept = llm.found(KeptDrafts)
    assert kept["verified"] > 100 and kept["waited"] > 0 and kept["moved"] > 0
    assert sum(one.count("num_preemptions") for one in found.values()) > 0
    assert sum(one.count("num_accepted_tokens") for one in found.values()) > 10
    for name, wanted in expected.items():
        assert found[name].all_tokens[: len(wanted.outputs)] == wanted.all_tokens
        for ours, alone in zip(found[name].outputs, wanted.outputs, strict=False):
            for mine, other in zip(ours.outputs, alone.outputs, strict=True):
                assert values_of(mine) == approximately(values_of(other))
    likeliest = found["alone"].outputs[0].outputs[0].logprobs[0]
    assert 3 <= len(likeliest) <= 4  # the sampled token need not be one of them


def values_of(output: CompletionOutput) -> list[dict[int, float]]:
    """Logprobs by token, at every position."""
    rows = output.logprobs or []
    return [{token: each.logprob for token, each in row.items()} for row in rows]


def approximately(values: list[dict[int, float]]) -> list[Any]:
    return [pytest.approx(of_place, abs=1e-3) for of_place in values]


def test_seeded_output_does_not_depend_on_draft_length(
    vllm_runner, models, scenarios, expected
):
    """With greedy drafts, fewer for larger batches, and block verification."""
    spec = speculative(
        models,
        "pard",
        DRAFTS,
        num_speculative_tokens_per_batch_size=[[1, 2, DRAFTS], [3, 4, 2], [5, 16, 1]],
        rejection_sample_method="block",
    )
    with vllm_runner(speculative_config=spec, **ENGINE, **ROOMY) as llm:
        served = llm.generate(scenarios["mixed"])
    assert served.count("num_accepted_tokens") > 0
    assert served.all_tokens[: len(SETTLED)] == expected["mixed"].all_tokens
