# SPDX-License-Identifier: Apache-2.0
"""A server that is stopped while clients read streams."""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Semaphore

import openai
import pytest

from .server import MODEL, Server

NUM_STREAMS, NUM_RUNNING = 8, 4
STOP_SECONDS = 5


def read_stream(server: Server, started: Semaphore) -> str | None:
    """The finish reason of a long answer, or what the server says instead."""
    try:
        chunks = server.client.completions.create(
            model=MODEL,
            prompt="def f(",
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(chunks):
            if number == 0:
                started.release()
            reason = chunk.choices[0].finish_reason
        return reason
    except openai.APIError as error:
        return error.message


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [None, "pard"])
def test_open_requests_end_with_the_server(drafter: str | None, serve, models):
    """Regression: it waited until clients gave up if a step was running. Requests that
    wait for others end, too."""
    flags = [f"--max-num-seqs={NUM_RUNNING}", "--max-model-len=2048"]
    if drafter is not None:
        spec = {"model": str(models / drafter)}
        flags += ["--speculative-config", json.dumps(spec)]
    started = Semaphore(0)
    with serve(*flags) as server, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [
            pool.submit(read_stream, server, started) for _ in range(NUM_STREAMS)
        ]
        for _ in range(NUM_RUNNING):
            assert started.acquire(timeout=60)
        begin = time.monotonic()
        server.terminate()
        assert time.monotonic() - begin < STOP_SECONDS
        assert not wait(streams, timeout=STOP_SECONDS).not_done
        assert {stream.result() for stream in streams} == {"abort"}
