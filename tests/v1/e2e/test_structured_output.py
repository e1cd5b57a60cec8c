# SPDX-License-Identifier: Apache-2.0
"""JSON schemas, regular expressions and choices, with every kind of drafter.

Requests of scenario "valid" arrive one by one, and are preempted by ones of higher
priority. Drafts are made without the grammar, and cut at the first invalid token.
Output equals the target's, and a grammar that the target follows anyway does not reduce
acceptance.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from .conftest import RunEngine
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
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": FUNCTION},
    "choice": {"choice": CHOICES},
}
LINES = {"regex": r"([ -~]*\n)*[ -~]*"}  # matches the target's unconstrained output


@pytest.fixture(scope="module")
def scenarios(make_prompt: Callable[[int, int], list[int]]) -> dict[str, list]:
    """Constrained requests share batches with unconstrained ones."""
    free = [{"prompt": make_prompt(48, 50 + i), "max_tokens": 24} for i in range(5)]
    lines = [{**r, "sampling": {"structured_outputs": LINES}} for r in free]
    constrained = [
        {
            "prompt": make_prompt(20 + i, i),
            "max_tokens": 100,
            "sampling": {"structured_outputs": grammar, "ignore_eos": False},
        }
        for i, grammar in enumerate(GRAMMARS.values())
    ]
    longer = [{**request, "max_tokens": 72} for request in free]
    valid = [
        {**request, "arrives": i, "priority": -i}
        for i, request in enumerate(constrained + longer)
    ]
    return {"free": free, "lines": lines, "valid": valid}


@pytest.fixture(scope="module")
def expected(once, run_engine: RunEngine, scenarios) -> dict[str, Any]:
    """Output of the target without drafts."""
    asked = {name: scenarios[name] for name in ("free", "valid")}
    found = once("structured", lambda: run_engine(asked, **ENGINE)["scenarios"])
    return found | {"lines": found["free"]}


@pytest.mark.parametrize("mode", only_fast(MODES, "pard"))
def test_structured_output(
    mode: str, run_engine: RunEngine, models, scenarios, expected
):
    result = run_engine(
        scenarios,
        speculative_config=speculative(models, mode, DRAFTS),
        async_scheduling=mode in AHEAD,
        **ENGINE,
    )
    for name, found in result["scenarios"].items():
        assert found["tokens"] == expected[name]["tokens"]
    assert result["drafter"].endswith("Drafter") and result["leaked_blocks"] == 0
    valid = result["scenarios"]["valid"]
    assert valid["ends"][:3] == ["stop"] * 3
    assert_valid(*valid["texts"][:3])
    assert valid["counters"]["num_preemptions"][0] > 0
    rates = {name: acceptance(found) for name, found in result["scenarios"].items()}
    assert rates["lines"] == pytest.approx(rates["free"], abs=0.02)
    assert rates["free"][0] > 0.3


def assert_valid(text: str, function: str, choice: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)
    assert re.fullmatch(FUNCTION, function)
    assert choice in CHOICES
