# SPDX-License-Identifier: Apache-2.0
"""Rounds of requests on an engine, and engines that take turns."""

import threading
import time
from itertools import pairwise
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from vllm.benchmarks.drafters import turns
from vllm.benchmarks.drafters.engine import Engine
from vllm.benchmarks.drafters.processes import EngineError, take_turns
from vllm.benchmarks.drafters.turns import Turns


class Stepper:
    """An LLM whose requests all get a token in each step."""

    def __init__(self):
        self.left: dict[str, int] = {}
        self.began: list[tuple[int, list[int]]] = []  # steps before, and prompt
        self.steps, self.most = 0, 0
        self.llm_engine = self

    def add_request(self, name, prompt, params):
        self.left[name] = params.max_tokens
        self.began.append((self.steps, prompt["prompt_token_ids"]))

    def step(self):
        self.steps, self.most = self.steps + 1, max(self.most, len(self.left))
        found = []
        for name in [*self.left]:
            self.left[name] -= 1
            one = SimpleNamespace(token_ids=[7], logprobs=None)
            ended = not self.left[name]
            found.append(
                SimpleNamespace(request_id=name, outputs=[one], finished=ended)
            )
            if ended:
                del self.left[name]
        return found

    def abort_request(self, names):
        for name in names:
            del self.left[name]

    def get_metrics(self):
        return []


def make_engine(pipe=None) -> Engine:
    engine = Engine.__new__(Engine)
    engine.llm, engine.num_requests, engine.pipe = Stepper(), 0, pipe
    engine.scheduler = SimpleNamespace(step_drafts=SimpleNamespace(policy=None))
    return engine


@pytest.mark.parametrize("staggered", [False, True])
def test_requests_begin_at_once_or_one_after_the_other(staggered):
    engine = make_engine()
    prompts, sampling = [[n] for n in range(8)], [{"max_tokens": 8}] * 8
    found = engine.run(prompts, sampling, 4, staggered=staggered)
    assert [answer.tokens for answer in found.answers] == [[7] * 8] * 8
    assert engine.llm.most == 4 and not engine.llm.left
    begun = [step for step, _ in engine.llm.began]
    if not staggered:
        assert begun == [0] * 4 + [8] * 4
        return
    # Those ahead end after 1 to 4 steps; the requests asked for take their places, and
    # others theirs until the last of them has ended.
    assert begun == [0] * 4 + [1, 2, 3, 4, 9, 10, 11, 12] + [17, 18, 19]
    assert [prompt for _, prompt in engine.llm.began[4:12]] == prompts


def test_a_single_request_at_a_time_is_not_staggered():
    engine = make_engine()
    engine.run([[1], [2]], [{"max_tokens": 3}] * 2, 1, staggered=True)
    assert [step for step, _ in engine.llm.began] == [0, 3]


class Process:
    """An `EngineProcess` whose engine is a thread."""

    def __init__(self, seconds: float, log: list[str], name: str, fails=False):
        self.pipe, theirs = Pipe()
        args = (theirs, seconds, log, name, fails)
        self.thread = threading.Thread(target=self.serve, args=args)
        self.thread.start()

    @staticmethod
    def serve(pipe, seconds, log, name, fails):
        command, given = pipe.recv()
        assert (command, given) == ("run", {"load": 3, "in_turns": True})
        clock = Turns(pipe)
        begin = clock.now()
        while clock.now() - begin < seconds:
            time.sleep(0.002)
            log.append(name)
            clock.end_step()
            if fails:
                pipe.send(EngineError("out of memory"))
                return
        pipe.send(clock.now() - begin)

    def tell(self, message):
        self.pipe.send(message)

    def hear(self):
        if isinstance(heard := self.pipe.recv(), EngineError):
            raise heard
        return heard


def run_processes(*processes: Process):
    try:
        return take_turns(*((process, {"load": 3}) for process in processes))
    finally:
        for process in processes:
            process.thread.join(10)
            assert not process.thread.is_alive()


def test_engines_take_turns(monkeypatch):
    """Never at the same time; the time of the other's turns does not count."""
    monkeypatch.setattr(turns, "TURN_S", 0.02)
    log: list[str] = []
    begin = time.perf_counter()
    found = run_processes(Process(0.1, log, "a"), Process(0.2, log, "b"))
    assert found[0] >= 0.1 and found[1] >= 0.2
    assert sum(found) <= time.perf_counter() - begin
    changes = sum(one != other for one, other in pairwise(log))
    assert changes >= 3 and log[0] == "a" and log[-1] == "b"


def test_the_other_engine_ends_its_round_if_one_fails(monkeypatch):
    monkeypatch.setattr(turns, "TURN_S", 0.01)
    log: list[str] = []
    both = Process(0.1, log, "a", fails=True), Process(0.1, log, "b")
    with pytest.raises(EngineError, match="memory"):
        run_processes(*both)
    assert log[-1] == "b"
