# SPDX-License-Identifier: Apache-2.0
"""Output equals the target's if only the likeliest drafts of a batch are verified."""

import pytest
import torch

from .hooks import draft_by_turns, take_defaults_of_a_gpu
from .made_up_times import make_up_times
from .oracle import assert_output_matches
from .recorded import Replays
from .runner import Request
from .test_unified_speculator import SAMPLING, only_fast
from .watches import Calls

ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 320,
    "block_size": 32,
}
# Steps with trees, between steps with chains, which are trimmed. Requests are preempted
# sometimes, so that the remaining ones are too few to trim.
TREES = {"pard": (11, 15), "pard2": (23, 31), "peagle": (11, 15)}
TREES |= {"eagle3": (11, 15), "draft": (19, 11)}
# KV cache blocks of 32 tokens: eight requests start, with room for the largest tree.
CROWDED = {"pard": 22, "pard2": 26, "peagle": 22, "eagle3": 28, "draft": 28}


@pytest.mark.parametrize("mode", only_fast(TREES, "pard"))
def test_alternating_trees_and_trimmed_chains(
    mode: str, vllm_runner, models, target, make_prompt
):
    """One request has a seed, one can only use chains, one asks for logprobs."""
    # A word that does not occur in the output anyway.
    params = {3: SAMPLING, 4: {"bad_words": ["zebra"]}, 5: {"logprobs": 1}}
    requests = [
        Request(make_prompt(36 + i, i), 36, **params.get(i, {})) for i in range(8)
    ]
    with vllm_runner(
        graphs=True,
        speculative_config={
            "model": str(models / mode),
            "enable_adaptive_verification": True,
        },
        setup=[take_defaults_of_a_gpu, make_up_times],
        async_scheduling=mode == "pard",
        num_gpu_blocks_override=CROWDED[mode],
        **ENGINE,
    ) as llm:
        llm.call(draft_by_turns, [7, 7, 7, *TREES[mode], 7, 2])
        llm.watch(Calls, "scheduler", "schedule", "verify_budget")
        served = llm.generate(requests)
        assert llm.found(Calls) > 0 and llm.found(Replays)["first"] > 0
    assert_output_matches(target, requests, served)
    text = requests[5].prompt + served.tokens[5]
    with torch.inference_mode():
        logits = target(torch.tensor([text])).logits[0, len(requests[5].prompt) - 1 :]
    best = logits[:-1].log_softmax(-1).amax(-1).tolist()
    rows = served.outputs[5].outputs[0].logprobs
    found = [max(each.logprob for each in row.values()) for row in rows]
    assert found == pytest.approx(best, abs=1e-3)
    assert served.count("num_tree_nodes") > 0
    assert served.count("num_preemptions") > 0
