# SPDX-License-Identifier: Apache-2.0
"""Each field of SamplingParams has the effect that it has on the target alone.

All requests are in the same batches, so that drafts of others are verified beside each.
"""

from collections.abc import Iterable
from typing import Any

import pytest

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    StructuredOutputsParams,
)

from .hooks import preempt_every
from .runner import Request
from .test_unified_speculator import only_fast, speculative

SEEDED = {"seed": 5, "temperature": 0.8}
DRAWS: dict[str, dict[str, Any]] = {"greedy": {}, "seeded": SEEDED}
IDS = [7, 300, 12]
PROMPT = 24  # tokens
STOPS = {"stop_token_ids": [*range(40, 400, 5)]}
STREAMED = {"output_kind": RequestOutputKind.DELTA}
ENDING = {"ignore_eos": False, "max_tokens": 32}
PROPERTIES = {"kind": {"enum": ["module", "class"]}, "lines": {"type": "integer"}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}
CHOICES = ["import os\nimport sys", "from typing import Any", "class Error(Exception):"]


def matching(regex: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=regex)


# By field: sampling parameters that let it have an effect.
FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 3, **SEEDED},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "temperature": {**SEEDED, "temperature": 1.4},
    "top_p": {"top_p": 0.3},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.5},
    "seed": {"seed": -6},
    "stop": {"stop": ["e", "("]},
    "stop_token_ids": STOPS,
    "ignore_eos": {"ignore_eos": False, "logit_bias": {1: 20.0}},
    "max_tokens": {"max_tokens": 5},
    "min_tokens": {"min_tokens": 9, **STOPS},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "prompt_logprob_token_ids": {
        "prompt_logprob_token_ids": [[7, -1, 5]] * (PROMPT - 1)
    },
    "prompt_logprob_start": {
        "prompt_logprob_token_ids": [[7, 12]] * (PROMPT - 4),
        "prompt_logprob_start": 3,
    },
    "logprob_token_ids": {"logprob_token_ids": IDS},
    "flat_logprobs": {"flat_logprobs": True, "logprobs": 2},
    "detokenize": {"detokenize": False},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {1: 20.0}},
    "spaces_between_special_tokens": {
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {1: 20.0},
    },
    "include_stop_str_in_output": {"stop": ["e"], "include_stop_str_in_output": True},
    "output_kind": {**STREAMED, "logprobs": 0},
    "stream_interval": {**STREAMED, "stream_interval": 3, "logprobs": 0},
    "skip_clone": {"skip_clone": True},
    "structured_outputs": {"structured_outputs": matching("[a-z]{3}[.][a-z_]{2,9}")},
    "logit_bias": {"logit_bias": {300: 20.0, 46: -20.0}},
    "allowed_token_ids": {"allowed_token_ids": [*range(20, 900, 2)]},
    "extra_args": {"extra_args": {"disable_spec_decode": True}},
    "bad_words": {"bad_words": ["the", "self", "):"]},
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "thinking_token_budget": {"thinking_token_budget": 4},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(
            max_pattern_size=3, min_count=2
        )
    },
}
# Beside the target's tokens, what a request's fields may ask for together.
TOGETHER: dict[str, dict[str, Any]] = {
    "scoring": {"logprob_token_ids": IDS, "max_tokens": 1},
    "as many": {"logprob_token_ids": IDS, "logprobs": 3},
    "streamed": {"logprob_token_ids": IDS, **STREAMED},
    "flat": {"logprob_token_ids": IDS, "flat_logprobs": True},
    "chosen": {"logprob_token_ids": IDS, "n": 2, **SEEDED},
    "in a grammar": {
        "logprob_token_ids": IDS,
        "structured_outputs": matching("[a-z]{2,9}[(][)]"),
    },
    "json": {"structured_outputs": StructuredOutputsParams(json=SCHEMA), **ENDING},
    "choice": {"structured_outputs": StructuredOutputsParams(choice=CHOICES), **ENDING},
    "penalties": {"logprob_token_ids": IDS, "presence_penalty": 1.0},
    "opted out": {
        "logprob_token_ids": IDS,
        "extra_args": {"disable_spec_decode": True},
    },
}
ELSEWHERE = {
    "watermarking": "not with the unified speculator",
    "trace_decode_token_ids": "refused with drafts",
    "routed_experts_prompt_start": "the target has no experts",
}
ENGINE: dict[str, Any] = {
    "structured_outputs_config": {"backend": "xgrammar"},
    "max_model_len": 64,
    "max_num_seqs": 12,
    # Fewer than 12 trees have nodes, so fewer rows of grammar masks.
    "max_num_batched_tokens": 128,
    "reasoning_config": {"reasoning_start_str": ' """', "reasoning_end_str": "pass"},
}


def test_no_field_is_missing():
    public = {name for name in SamplingParams.__struct_fields__ if name[0] != "_"}
    assert public - {"output_text_buffer_length"} == FIELDS.keys() | ELSEWHERE.keys()


@pytest.fixture(scope="module")
def requests(make_prompt) -> dict[str, Request]:
    """Each case, greedy and seeded."""
    prompt, asked = make_prompt(PROMPT, 61), {"nothing": {}} | FIELDS | TOGETHER
    return {
        f"{name}, {draws}": Request(prompt, **{"max_tokens": 16} | start | params)
        for name, params in asked.items()
        for draws, start in DRAWS.items()
    }


# By mode: drafter, and settings of the speculation.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("pard", {}),
    "tree": ("pard", {"draft_tree": 15}),
    "probabilistic": ("draft", {"draft_sample_method": "probabilistic"}),
    "block": ("pard", {"rejection_sample_method": "block"}),
    "probabilistic-block": (
        "eagle3",
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    ),
    "stepwise-tree": ("eagle3", {"draft_tree": 15}),
}
FAST = ("tree", "probabilistic")
# They change how a request is processed, not what it returns.
SAME_ANSWER = {"skip_clone", "extra_args", "skip_reading_prefix_cache"}


@pytest.fixture(scope="module")
def outputs_of(vllm_runner, models, requests):
    """Outputs by case, of a mode, or of the target alone ("alone")."""

    def run(mode: str) -> dict[str, RequestOutput]:
        spec = None
        if mode != "alone":
            drafter, more = MODES[mode]
            spec = speculative(models, drafter, 4, **more)
        is_ahead = "block" in mode  # steps are scheduled before the last one's tokens
        with vllm_runner(
            speculative_config=spec, async_scheduling=is_ahead, **ENGINE
        ) as llm:
            if mode == "probabilistic-block":
                llm.call(preempt_every, 9)
            served = llm.generate(list(requests.values()))
        accepted = served.counters.get("num_accepted_tokens", [0])[0]
        assert (accepted > 0) == (mode != "alone")
        return dict(zip(requests, served.outputs, strict=True))

    return run


def answer_of(output: RequestOutput) -> list[Any]:
    """All that a request returns, in plain values."""
    scores = output.prompt_token_id_logprobs
    of_prompt = by_token(output.prompt_logprobs)
    of_prompt += [] if scores is None else scores.tolist()
    first = output.outputs[0]
    return [of_prompt, first.text, first.finish_reason] + [
        [list(one.token_ids), by_token(one.logprobs)] for one in output.outputs
    ]


def by_token(rows: Iterable[Any] | None) -> list[Any]:
    """Logprobs by token id of each position; a prompt's first one has none."""
    return [
        row and {token: one.logprob for token, one in row.items()} for row in rows or ()
    ]


@pytest.fixture(scope="module")
def alone(outputs_of) -> dict[str, Any]:
    """Answers of the target alone."""
    return {case: answer_of(output) for case, output in outputs_of("alone").items()}


def rounded(answer: Any) -> Any:
    """An answer whose logprobs can be compared with another engine's."""
    if isinstance(answer, dict):
        return {key: rounded(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [rounded(value) for value in answer]
    return pytest.approx(answer, abs=1e-3) if isinstance(answer, float) else answer


@pytest.mark.parametrize("mode", only_fast(MODES, *FAST))
def test_fields_have_their_effect(mode: str, outputs_of, alone):
    for case, output in outputs_of(mode).items():
        assert answer_of(output) == rounded(alone[case]), case


def test_fields_change_answers(alone, on_cpu: bool):
    """Otherwise comparing them would show nothing."""
    if not on_cpu:
        pytest.skip("the values have an effect on the text that a CPU samples")
    unchanged = {
        case
        for case in FIELDS
        if all(alone[f"{case}, {it}"] == alone[f"nothing, {it}"] for it in DRAWS)
    }
    assert unchanged == SAME_ANSWER
