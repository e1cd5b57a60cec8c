# SPDX-License-Identifier: Apache-2.0
"""Counters and metrics of requests agree, and count the tokens that were received."""

from typing import Any

import pytest
import torch

from vllm.sampling_params import StructuredOutputsParams

from .oracle import assert_output_matches
from .recorded import Replays
from .runner import Engine, Request
from .test_unified_speculator import only_fast, speculative

K, N = 5, 15
REFUSES = {"extra_args": {"disable_spec_decode": True}}
WORDS = StructuredOutputsParams(regex="[a-z ]{1,30}")
GRAMMAR = {"structured_outputs": WORDS, "ignore_eos": False}
# A request that penalizes tokens verifies the chain of its tree.
PENALTY = {"presence_penalty": 0.5}
TREE, ASYNC = {"draft_tree": N}, {"async_scheduling": True}
# Speculative config, and arguments of the engine. With graphs all requests replay them,
# beside one that refuses drafts.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chains": ({}, {"graphs": True}),
    "async": ({}, ASYNC),
    "trees": (TREE, {}),
    "async trees": (TREE, ASYNC),
    "changing": ({"num_speculative_tokens_per_batch_size": [[1, 4, K], [5, 8, 2]]}, {}),
    "sampled": ({"draft_sample_method": "probabilistic"}, {}),
}
ENGINE = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "structured_outputs_config": {"backend": "xgrammar"},
    "per_request_spec_decode_metrics": "summary",
}


@pytest.mark.parametrize("way", only_fast(WAYS, "chains", "async trees"))
@pytest.mark.parametrize("mode", only_fast(("pard", "eagle3"), "pard"))
def test_metrics_of_requests_add_up(
    mode: str, way: str, vllm_runner, models, make_prompt
):
    lengths = {2: {}, 3: {}, 4: {}, 40: REFUSES, 41: {}, 42: PENALTY, 43: GRAMMAR}
    requests = [
        Request(make_prompt(20 + n, n), n, **params) for n, params in lengths.items()
    ]
    spec, how = WAYS[way]
    spec = speculative(models, mode, K, **spec)
    with vllm_runner(speculative_config=spec, **ENGINE, **how) as llm:
        served = llm.generate(requests)
        assert "graphs" not in how or llm.found(Replays)["first"] > 0
    metrics = [one.outputs[0].spec_decode_metrics.to_dict() for one in served.outputs]
    assert {one["num_spec_tokens"] for one in metrics} == {K}
    sums = {
        "num_drafts": "num_spec_steps",
        "num_draft_tokens": "num_draft_tokens",
        "num_accepted_tokens": "num_accepted_draft_tokens",
    }
    for counter, name in sums.items():
        assert served.count(counter) == sum(one[name] for one in metrics)
    rows = zip(lengths.values(), metrics, served.tokens, strict=True)
    for params, one, tokens in rows:
        if params == REFUSES:
            assert one["num_spec_steps"] == one["num_draft_tokens"] == 0
        elif params != GRAMMAR:
            # The prompt's step has no drafts.
            steps, accepted = one["num_spec_steps"], one["num_accepted_draft_tokens"]
            assert len(tokens) == 1 + steps + accepted


# Matches the target's unconstrained output.
LINES = StructuredOutputsParams(regex=r"([ -~]*\n)*[ -~]*")


@pytest.mark.parametrize("mode", only_fast(("pard", "eagle3"), "pard"))
def test_grammar_that_the_target_follows_costs_no_acceptance(
    mode: str, vllm_runner, models, make_prompt
):
    def requests(**more: Any) -> list[Request]:
        return [Request(make_prompt(48, 50 + i), 24, **more) for i in range(5)]

    spec, found = speculative(models, mode, K), []
    with vllm_runner(speculative_config=spec, **ENGINE) as llm:
        free = llm.generate(requests())
        lines = llm.generate(requests(structured_outputs=LINES))
    assert lines.tokens == free.tokens
    for served in (free, lines):
        accepted, drafts = served.counters["num_accepted_tokens_per_pos"], "num_drafts"
        found.append([count / served.count(drafts) for count in accepted])
    assert found[1] == pytest.approx(found[0], abs=0.02)
    assert found[0][0] > 0.3


def embeddings(engine: Engine, tokens: list[int]) -> torch.Tensor:
    """[tokens, hidden size], the target's."""
    model = engine.worker.model_runner.model
    device = next(model.parameters()).device
    return model.embed_input_ids(torch.tensor(tokens, device=device)).cpu()


@pytest.mark.parametrize("mode", only_fast(("pard", "eagle3"), "pard"))
def test_prompt_embeddings(mode: str, vllm_runner, models, target, make_prompt):
    """Output is the target's, and a drafter that sees tokens alone is reported once."""
    requests = [Request(make_prompt(20 + n, n), 30) for n in range(3)]
    with vllm_runner(
        speculative_config=speculative(models, mode, K),
        enable_prompt_embeds=True,
        max_model_len=128,
    ) as llm:
        embedded = [
            Request({"prompt_embeds": llm.call(embeddings, one.prompt)}, 30)
            for one in requests
        ]
        served = llm.generate(embedded)
        lines = llm.log.count("Requests with prompt embeddings: the drafter does not")
    assert_output_matches(target, requests, served)
    assert served.count("num_accepted_tokens") > 0
    assert lines == (mode == "pard")
