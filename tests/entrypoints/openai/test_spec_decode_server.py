# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the bundled target and PARD, through the OpenAI client.

Expected answers are those of the target alone, in plain PyTorch.
"""

import asyncio
import json
import re
import time
import urllib.error
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT
from tests.v1.e2e.oracle import load_model

from .clients import Asks, Traffic, answer_alone
from .server import Server

NUM_SPEC_TOKENS = 7
LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: .*Per-position acceptance.*, "
    r"Method: draft_model, Mode: pard, Draft time share: \d+\.\d%, Draft length: 7\n"
)
CODE = "import os\nimport sys\n\n\ndef main(argv):\n    "
DASHBOARD = "examples/observability/dashboards/grafana/vllm_drafting.json"
GREEDY = {"model": "target", "temperature": 0, "max_tokens": 24}


def complete(client: openai.OpenAI) -> str:
    return client.completions.create(prompt=CODE, **GREEDY).choices[0].text


@pytest.fixture
def asks(models: Path) -> Asks:
    """Requests with prefixes of `CODE`, and the target's answers to them."""
    target = load_model(models / "target")
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    prompts = [CODE[:n] for n in range(len(CODE), 3, -7)]
    answers = [
        answer_alone(target, tokenizer(prompt)["input_ids"], {"temperature": 0}, 24)
        for prompt in prompts
    ]
    return Asks(answers, tokenizer, leaving=0.4)


def test_server(serve, models, asks: Asks):
    """One test, since a server takes long to start, and the last check stops it."""
    config = {
        "model": str(models / "pard"),
        "method": "draft_model",
        "num_speculative_tokens": NUM_SPEC_TOKENS,
        "parallel_drafting": True,
    }
    expected = asks.text_of(asks.answers[0])  # the target's answer to `CODE`
    with serve("--speculative-config", json.dumps(config)) as server:
        assert complete(server.client) == expected != ""
        check_too_large_request_fails_alone(server)
        assert complete(server.client) == expected
        check_metrics_and_log(server)
        check_documented_metrics_are_exported(server)
        check_concurrent_clients_that_disconnect(server, asks)
        check_sigterm_shuts_down_cleanly(server)


def check_too_large_request_fails_alone(server):
    """Regression: it ended the engine for all requests."""
    for more in (
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"extra_body": {"bad_words": ["many words of a client " * 300]}},
    ):
        with pytest.raises(openai.BadRequestError, match="must be at most"):
            server.client.completions.create(prompt=CODE, **GREEDY, **more)


def check_metrics_and_log(server):
    """`tests/v1/metrics` tests what each counter counts."""
    deadline = time.monotonic() + 30
    while not (
        counted(server, "num_timed_steps") and LINE.search(server.log.read_text())
    ):
        assert time.monotonic() < deadline
        complete(server.client)
    drafts, drafted = counted(server, "num_drafts"), counted(server, "num_draft_tokens")
    assert 0 < drafted <= drafts * NUM_SPEC_TOKENS
    assert counted(server, "num_draft_tokens_per_pos") == drafted
    accepted = counted(server, "num_accepted_tokens")
    assert counted(server, "num_accepted_tokens_per_pos") == accepted > 0
    assert counted(server, "num_steps") >= 16 * counted(server, "num_timed_steps")
    assert counted(server, "target_seconds") > 0 < counted(server, "draft_seconds")
    own = {"method": "draft_model", "mode": "pard", "model_name": "target"}
    for sample in server.samples():
        if sample.name.startswith("vllm:spec_decode_"):
            assert own.items() <= sample.labels.items(), sample.name


def counted(server: Server, name: str) -> float:
    return server.metrics()[f"spec_decode_{name}_total"]


def check_documented_metrics_are_exported(server):
    """Except those of trees, which `tests/v1/e2e/test_draft_trees.py` tests, and of
    draft lengths that the engine chooses."""
    exported = {sample.name for sample in server.samples()}
    for file in ("docs/observability.md", DASHBOARD):
        text = (ROOT / file).read_text()
        named = set(re.findall(r"vllm:(?!\w*(?:tree|gain))\w+", text))
        assert len(named) > 3 and named <= exported


def check_concurrent_clients_that_disconnect(server, asks: Asks):
    traffic = Traffic(server.url, asks, tie=0.0)
    for all_leave in (False, True):
        asyncio.run(traffic.round(16, 3.0, all_leave))
    assert not traffic.complaints
    assert traffic.counts["whole"] > 0 < traffic.counts["aborted"]
    assert not any(server.wait_until_idle().values())


def check_sigterm_shuts_down_cleanly(server):
    status, alive = server.terminate()
    assert status == 0, server.log.read_text()
    assert not alive
    with pytest.raises(urllib.error.URLError):
        server.get("/health")
