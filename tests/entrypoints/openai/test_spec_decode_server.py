# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with the bundled target and PARD, through the OpenAI client.

Expected answers are those of the target alone, in plain PyTorch.
"""

import asyncio
import json
import re
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Semaphore

import openai
import pytest
from transformers import AutoTokenizer

from tests.conftest import ROOT

from .clients import Answer, Asks, Traffic
from .server import MODEL, Server

NUM_SPEC_TOKENS = 7
LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: .*Per-position acceptance.*, "
    r"Method: draft_model, Mode: pard, Draft time share: \d+\.\d%, Draft length: 7\n"
)
DASHBOARD = "examples/observability/dashboards/grafana/vllm_drafting.json"
NUM_RUNNING, NUM_STREAMS, STOP_SECONDS = 8, 12, 5


def complete(server: Server, answer: Answer) -> str:
    body = {"prompt": answer.prompt, "max_tokens": len(answer.tokens)}
    made = server.client.completions.create(model=MODEL, **body, **answer.sampling)
    return made.choices[0].text


def test_server(serve, models, answers: list[Answer]):
    """One test, since a server takes long to start, and the last check stops it."""
    config = {
        "model": str(models / "pard"),
        "method": "draft_model",
        "num_speculative_tokens": NUM_SPEC_TOKENS,
        "parallel_drafting": True,
    }
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    asks, (first, *_) = Asks(answers, tokenizer, leaving=0.4), answers
    expected = asks.text_of(first)
    with serve("--speculative-config", json.dumps(config)) as server:
        assert complete(server, first) == expected != ""
        check_too_large_request_fails_alone(server)
        assert complete(server, first) == expected
        check_metrics_and_log(server, first)
        check_documented_metrics_are_exported(server)
        check_concurrent_clients_that_disconnect(server, asks)
        check_sigterm_ends_open_requests(server)


def check_too_large_request_fails_alone(server):
    """Regression: it ended the engine for all requests."""
    for more in (
        {"logit_bias": {str(token): 1 for token in range(1025)}},
        {"extra_body": {"bad_words": ["many words of a client " * 300]}},
    ):
        with pytest.raises(openai.BadRequestError, match="must be at most"):
            server.client.completions.create(model=MODEL, prompt=[1], **more)


def check_metrics_and_log(server, answer: Answer):
    """`tests/v1/metrics` tests what each counter counts."""
    deadline = time.monotonic() + 30
    while not (
        counted(server, "num_timed_steps") and LINE.search(server.log.read_text())
    ):
        assert time.monotonic() < deadline
        complete(server, answer)
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
    """Except those of trees, see `tests/v1/e2e/test_unified_speculator.py`, and of
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


def check_sigterm_ends_open_requests(server):
    """Regression: it waited until clients gave up if a step was running. Requests that
    wait for others end, too."""
    started = Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [
            pool.submit(read_stream, server, started) for _ in range(NUM_STREAMS)
        ]
        for _ in range(NUM_RUNNING):
            assert started.acquire(timeout=60)
        begin = time.monotonic()
        status, alive = server.terminate()
        assert time.monotonic() - begin < STOP_SECONDS
        assert not wait(streams, timeout=STOP_SECONDS).not_done
    assert {stream.result() for stream in streams} == {"abort"}
    assert status == 0, server.log.read_text()
    assert not alive
    with pytest.raises(urllib.error.URLError):
        server.get("/health")


def read_stream(server: Server, started: Semaphore) -> str | None:
    """The finish reason of a long answer, or what the server says instead."""
    body = {"prompt": [1], "max_tokens": 1900, "stream": True}
    body["extra_body"] = {"ignore_eos": True}
    try:
        chunks = server.client.completions.create(model=MODEL, **body)
        for number, chunk in enumerate(chunks):
            if number == 0:
                started.release()
            reason = chunk.choices[0].finish_reason
        return reason
    except openai.APIError as error:
        return error.message
