# SPDX-License-Identifier: Apache-2.0
"""A KV cache for one long request, priorities, aborts: the target's own output.

Requests arrive one by one, and are preempted all the time by those that matter more.
Stop strings are among the traffic of `tests/entrypoints/openai`.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from .conftest import RunEngine
from .test_unified_speculator import only_fast, speculative

MAX_MODEL_LEN = 128
ENGINE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "block_size": 32,
    "num_gpu_blocks_override": 1 + MAX_MODEL_LEN // 32,
    "scheduling_policy": "priority",
    "enable_prefix_caching": True,
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,
    },
}
NUM_REQUESTS = 10
# What matters most, though it arrives last, ends before what matters least. The order
# among each is left open: two may fit at once, and a grammar may be compiled late.
FIRST, LAST = (6, 8, 9), (0, 2)
ABORTED = (1, 3, 4, 7)  # long ones, and none of those
MODES = ("pard", "eagle3")  # a draft model and a head, masks and a loop
AHEAD = ("pard",)  # steps scheduled before the last one's tokens are known
REPLAYED = ("eagle3",)  # draft passes are CUDA graphs, on a CPU as if
JSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["class", "function"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
GRAMMAR = {"structured_outputs": {"json": JSON}}
Requests = list[dict[str, Any]]


@pytest.fixture(scope="module")
def storm(make_prompt: Callable[[int, int], list[int]]) -> Requests:
    """Prompts share beginnings; each request matters more than those before it.

    Many fit into the KV cache when they start, and one when it ends.
    """
    pieces = [make_prompt(40, seed) for seed in range(2)]
    requests = [
        {
            "prompt": pieces[i % 2][: 40 - 3 * i],
            "max_tokens": 1 if i == 5 else 50 + 4 * (i % 3),
            "arrives": 2 * i,
            "priority": -i,
            "stream": i % 3 == 0,
        }
        for i in range(NUM_REQUESTS)
    ]
    for i in (2, 6):
        requests[i] |= {"sampling": GRAMMAR | {"ignore_eos": False}}
    return requests


def with_aborts(storm: Requests, mode: str) -> Requests:
    """Three of the requests are aborted, after as many tokens as chance says."""
    chance, requests = random.Random(mode), [dict(request) for request in storm]
    for i in chance.sample(ABORTED, 3):
        requests[i]["abort_after"] = chance.randint(1, 40)
    return requests


@pytest.fixture(scope="module")
def ends(models, make_prompt) -> Requests:
    """The target can say nothing but that it ends, which is heeded or not."""
    end = AutoTokenizer.from_pretrained(models / "target").eos_token_id
    return [
        {
            "prompt": make_prompt(20, 3),
            "max_tokens": 9,
            "sampling": {"ignore_eos": ignore, "allowed_token_ids": [end]},
        }
        for ignore in (True, False)
    ]


@pytest.fixture(scope="module")
def expected(once, run_engine: RunEngine, storm, ends) -> dict[str, Any]:
    """The target alone, undisturbed."""
    keep = ("prompt", "max_tokens", "sampling")
    requests = {
        "storm": [{k: r[k] for k in keep if k in r} for r in storm],
        "ends": ends,
    }
    alone = ENGINE | {"num_gpu_blocks_override": None, "scheduling_policy": "fcfs"}
    return once("pressure", lambda: run_engine(requests, **alone)["scenarios"])


@pytest.mark.parametrize("mode", only_fast(MODES, "pard"))
def test_under_pressure(
    mode: str, run_engine: RunEngine, models, storm, ends, expected
):
    result = run_engine(
        {"storm": with_aborts(storm, mode), "ends": ends},
        speculative_config=speculative(models, mode, 5),
        async_scheduling=mode in AHEAD,
        record_graphs=mode in REPLAYED,
        **ENGINE,
    )
    assert (result["scheduler"] == "AsyncScheduler") == (mode in AHEAD)
    assert (mode not in REPLAYED) or result["replays"]["first"] > 0
    found = result["scenarios"]
    for name, alone in expected.items():
        answers = found[name]["tokens"], found[name]["aborted"], alone["tokens"]
        rows = zip(*answers, strict=True)
        for tokens, aborted, answer in rows:
            assert tokens == (answer[: len(tokens)] if aborted else answer)
    assert result["drafter"].endswith("Drafter") and result["leaked_blocks"] == 0
    assert [len(tokens) for tokens in found["ends"]["tokens"]] == [9, 1]
    assert sum(found["storm"]["aborted"]) == 3
    assert found["storm"]["counters"]["num_preemptions"][0] >= 5
    ends_at = found["storm"]["last_steps"].__getitem__
    assert max(map(ends_at, FIRST)) < min(map(ends_at, LAST))
