# SPDX-License-Identifier: Apache-2.0
"""Probabilistic drafts: seeds, mixed batches, and the distribution that verifies them.

Seeded requests must give the target's own tokens, like greedy ones, whatever else is in
the batch: here chunked prompts, requests that wait, and preemption.
"""

from dataclasses import replace
from typing import Any

import pytest

from .oracle import assert_output_matches
from .recorded import Replays
from .runner import Request
from .test_unified_speculator import MODES, only_fast, speculative
from .watches import KeptDrafts

DRAFTS = 4
AHEAD = ("pard", "eagle3")  # steps scheduled before the last one's tokens are known
REPLAYED = ("draft", "pard")  # draft passes are CUDA graphs, emulated on a CPU
# Prompts are chunked, some drafts are cut, and the KV cache holds 320 tokens. Seven
# requests with drafts use up the budget, so an eighth one waits with its drafts.
ENGINE: dict[str, Any] = {
    "max_model_len": 160,
    "enable_prefix_caching": False,
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 35,
    "num_gpu_blocks_override": 11,
}
# The output of all but the last two is determined by the target alone.
SAMPLING: list[dict[str, Any]] = [
    *({"seed": 7 + i, "temperature": t} for i, t in enumerate((1.0, 0.3, 2.0, 0.8))),
    *({} for _ in range(4)),
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
]


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[Request]]:
    def make(number: int, length: int, tokens: int, **sampling: Any) -> Request:
        return Request(make_prompt(length, 200 + number), tokens, **sampling)

    return {
        "mixed": [
            make(i, 12 + 9 * (i % 4), 10, **each) for i, each in enumerate(SAMPLING)
        ],
        # Once they grow past three blocks, only two fit into the KV cache; they go on
        # for long, however many drafts are accepted.
        "preempted": [
            make(20 + i, 92, 40, seed=1 + i, temperature=0.6) for i in range(3)
        ],
        "crowded": [
            make(40 + i, 3, 5 + i, seed=40 + i, temperature=1.0) for i in range(8)
        ],
    }


@pytest.mark.parametrize("mode", only_fast(MODES, "draft", "pard"))
def test_greedy_and_seeded_output_matches_target(
    mode: str, vllm_runner, models, target, scenarios
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
    ) as llm:
        assert "Draft probabilities take" in llm.log
        llm.watch(KeptDrafts)
        found = {name: llm.generate(asked) for name, asked in scenarios.items()}
        assert not is_replayed or llm.found(Replays)["first"] > 0
        kept = llm.found(KeptDrafts)
    assert kept["verified"] > 100 and kept["waited"] > 0 and kept["moved"] > 0
    assert sum(one.count("num_preemptions") for one in found.values()) > 0
    assert sum(one.count("num_accepted_tokens") for one in found.values()) > 10
    for name, asked in scenarios.items():
        settled = [
            one for one in asked if one.params.seed or not one.params.temperature
        ]
        outputs = found[name].outputs[: len(settled)]
        assert_output_matches(target, settled, replace(found[name], outputs=outputs))
