# SPDX-License-Identifier: Apache-2.0
"""JSON schemas, regular expressions and choices, with every kind of drafter.

Requests of "valid" arrive one by one, and are preempted by ones of higher
priority. Drafts are made without the grammar, and cut at the first invalid token.
Output equals the target's, and a grammar that the target follows anyway does not reduce
acceptance.
"""

import json
import re
from collections.abc import Callable

import jsonschema
import pytest

from vllm.sampling_params import StructuredOutputsParams

from .hooks import drafter_name
from .runner import Request
from .test_published_drafters import acceptance
from .test_unified_speculator import MODES, only_fast, speculative

DRAFTS = 5
AHEAD = ("pard", "eagle3")  # async: scheduled before the last step's drafts are known
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "scheduling_policy": "priority",
    # The KV cache holds the five requests of "free" to their end, but not "valid".
    "block_size": 32,
    "num_gpu_blocks_override": 1 + 5 * 3,
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{1,12}$"},
        "kind": {"enum": ["module", "class", "function"]},
        "lines": {"type": "integer", "minimum": 0, "maximum": 9999},
        "public": {"type": "boolean"},
    },
    "required": ["name", "kind", "lines", "public"],
    "additionalProperties": False,
}
FUNCTION = r"def [a-z_]{1,12}\([a-z]{1,6}(, [a-z]{1,6}){0,2}\):\n    return [a-z]{1,9}"
CHOICES = ["import os\nimport sys", "from typing import Any", "class Error(Exception):"]
GRAMMARS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=FUNCTION),
    StructuredOutputsParams(choice=CHOICES),
]
# Matches the target's unconstrained output.
LINES = StructuredOutputsParams(regex=r"([ -~]*\n)*[ -~]*")


@pytest.fixture(scope="module")
def scenarios(
    make_prompt: Callable[[int, int], list[int]],
) -> dict[str, list[Request]]:
    """Constrained requests share batches with unconstrained ones."""
    prompts = [make_prompt(48, 50 + i) for i in range(5)]
    valid = [
        (make_prompt(20 + i, i), 100, {"structured_outputs": each, "ignore_eos": False})
        for i, each in enumerate(GRAMMARS)
    ]
    valid += [(prompt, 72, {}) for prompt in prompts]
    return {
        "free": [Request(prompt, 24) for prompt in prompts],
        "lines": [Request(prompt, 24, structured_outputs=LINES) for prompt in prompts],
        "valid": [
            Request(prompt, tokens, arrives=i, priority=-i, **sampling)
            for i, (prompt, tokens, sampling) in enumerate(valid)
        ],
    }


@pytest.fixture(scope="module")
def expected(once, vllm_runner, scenarios) -> dict[str, list[list[int]]]:
    """Output of the target without drafts."""

    def serve() -> dict[str, list[list[int]]]:
        with vllm_runner(**ENGINE) as llm:
            free, valid = (
                llm.generate(scenarios[it]).tokens for it in ("free", "valid")
            )
            return {"free": free, "lines": free, "valid": valid}

    return once("structured", serve)


@pytest.mark.parametrize("mode", only_fast(MODES, "pard"))
def test_structured_output(mode: str, vllm_runner, models, scenarios, expected):
    with vllm_runner(
        speculative_config=speculative(models, mode, DRAFTS),
        async_scheduling=mode in AHEAD,
        **ENGINE,
    ) as llm:
        assert llm.call(drafter_name).endswith("Drafter")
        found = {name: llm.generate(asked) for name, asked in scenarios.items()}
    assert {name: served.tokens for name, served in found.items()} == expected
    answers = [output.outputs[0] for output in found["valid"].outputs[:3]]
    assert [answer.finish_reason for answer in answers] == ["stop"] * 3
    written, function, choice = (answer.text for answer in answers)
    jsonschema.validate(json.loads(written), SCHEMA)
    assert re.fullmatch(FUNCTION, function)
    assert choice in CHOICES
    assert found["valid"].count("num_preemptions") > 0
    free, lines = acceptance(found["free"]), acceptance(found["lines"])
    assert lines == pytest.approx(free, abs=0.02)
    assert free[0] > 0.3
