# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own."""

import os
import sys
import time

import pytest

from vllm.benchmarks.drafters.processes import (
    EngineError,
    EngineProcess,
    last_error,
    serve_engine,
)

STOP_S = 10


class FakeEngine:
    def __init__(self, size: int) -> None:
        print("Loading weights", flush=True)
        self.size = size

    def add_up(self, more: int) -> int:
        return self.size + more

    def fail(self) -> None:
        raise ValueError("no such request")

    def exit(self) -> None:
        print("RuntimeError: out of memory", flush=True)
        os._exit(3)

    def sleep(self) -> None:
        time.sleep(60)

    def end(self) -> None:
        print("ended", flush=True)


def serve(number: int) -> None:
    serve_engine(number, FakeEngine)


@pytest.fixture
def start(tmp_path):
    """Starts an engine; all are stopped in the end."""
    started = []

    def start() -> EngineProcess:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        how = [sys.executable, "-P"], (__name__, "serve"), {"size": 3}, env
        started.append(EngineProcess(*how, tmp_path / f"{len(started)}.log"))
        return started[-1]

    yield start
    for engine in started:
        engine.stop(wait_s=0)


def test_each_engine_ends_when_its_pipe_is_closed(start):
    """Though others were started while that was open."""
    first, second = start(), start()
    assert first.ask("add_up", more=1) == second.ask("add_up", more=1) == 4
    for engine in (first, second):
        begin = time.monotonic()
        engine.stop(STOP_S)
        assert time.monotonic() - begin < STOP_S / 2
        assert engine.process.returncode == 0
        assert engine.log.read_text().splitlines()[-2:] == ["Loading weights", "ended"]


def test_a_busy_engine_is_killed(start):
    engine = start()
    assert engine.ask("add_up", more=1) == 4
    with pytest.raises(EngineError, match=r"no answer within 0 s"):
        engine.ask("sleep", timeout_s=0.1)
    engine.stop(wait_s=0)
    assert engine.process.returncode < 0


def test_errors_name_the_log(start):
    engine = start()
    with pytest.raises(EngineError, match=r"ValueError: no such request .*0\.log"):
        engine.ask("fail")
    with pytest.raises(EngineError, match=r"it ended: RuntimeError: out of memory"):
        engine.ask("exit")


def test_last_error():
    assert last_error("a\nValueError: too long\nbye\n") == "ValueError: too long"
    assert last_error("a\nb\n") == "b" and last_error("") == "it printed nothing"
