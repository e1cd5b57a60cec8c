# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own."""

import logging
import os
import time

import pytest
import torch

from vllm.benchmarks.drafters import processes
from vllm.benchmarks.drafters.processes import EngineError, EngineProcess
from vllm.logger import init_logger
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="elsewhere a server forks engines"
)
MANY = 1 << 20  # elements: as many as several threads add up
logger = init_logger("vllm.fake")


class FakeEngine:
    def __init__(self, *_) -> None:
        # pytest replaces the stream that vLLM logs to.
        stdout = os.fdopen(os.dup(1), "w")
        logging.getLogger("vllm").addHandler(logging.StreamHandler(stdout))
        logger.warning_once("Loading weights")

    def add_up(self) -> float:
        return torch.ones(MANY).sum().item()

    def fail(self) -> None:
        raise ValueError("no such request")

    def exit(self) -> None:
        os._exit(3)

    def end(self) -> None:
        pass


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts an engine; all are stopped in the end."""
    monkeypatch.setattr(processes, "Engine", FakeEngine)
    monkeypatch.setattr(processes, "STOP_S", 10)
    started = []

    def start() -> EngineProcess:
        log = tmp_path / f"{len(started)}.log"
        started.append(EngineProcess(None, {}, log))
        return started[-1]

    yield start
    for engine in started:
        engine.stop()


def test_each_engine_ends_when_its_pipe_is_closed(start):
    """Though others were forked while that was open."""
    first, second = start(), start()
    assert first.ask("add_up") == second.ask("add_up") == MANY
    for engine in (first, second):
        begin = time.monotonic()
        engine.stop()
        assert time.monotonic() - begin < processes.STOP_S / 2
        assert engine.process.exitcode == 0


def test_an_engine_computes_in_parallel(start, monkeypatch):
    """Which hangs after a fork of a process that did, too."""
    monkeypatch.setattr(processes, "NUM_THREADS", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        processes.import_ahead()
        assert torch.get_num_threads() == 1
        torch.ones(MANY).sum()
        engine = start()
        engine.tell(("add_up", {}))
        assert engine.pipe.poll(60)
        assert engine.hear() == MANY
    finally:
        torch.set_num_threads(before)


def test_each_engine_logs_what_is_logged_once(start):
    logger.warning_once("Loading weights")
    for engine in (start(), start()):
        engine.ask("add_up")
        assert engine.log.read_text().count("Loading weights") == 1


def test_errors_name_the_log(start):
    engine = start()
    with pytest.raises(EngineError, match=r"ValueError: no such request \(.*0\.log"):
        engine.ask("fail")
    with pytest.raises(EngineError, match="it ended, exit status 3"):
        engine.ask("exit")
