# SPDX-License-Identifier: Apache-2.0
"""Engines of tests, each in a process of its own.

A test starts one with the fixture `vllm_runner`, and gets vLLM's outputs from it:

    with vllm_runner(speculative_config=config, max_num_seqs=8) as llm:
        served = llm.generate([Request(prompt, max_tokens=20)])

Whatever else a test does to an engine is a function that runs in the engine's process:
`llm.call(preempt_every, 7)`; see `hooks.py` and `watches.py`.
"""

import gc
import os
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.metrics.reader import Gauge

COUNTERS = ("vllm:spec_decode_", "vllm:num_preemptions", "vllm:prefix_cache_hits")
COUNTERS += ("vllm:external_prefix_cache_hits",)
ENGINE = {
    "dtype": "float32",  # no ties of logits by rounding
    "enforce_eager": True,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.1,
    "use_tqdm_on_load": False,
    "async_scheduling": False,
}
Setup = Callable[[], Any]
START = threading.Lock()  # the environment belongs to all threads


class EngineError(Exception):
    """An engine did not start, or a function failed in it; its log is printed."""


class Request:
    """A request, and when it comes and goes.

    Args:
        prompt: token ids, or another of vLLM's prompts.
        arrives: step of `generate` before which it is added.
        abort_after: number of its tokens after which it is aborted.
        params: sampling parameters; by default it is greedy.
    """

    def __init__(
        self,
        prompt: Any,
        max_tokens: int,
        arrives: int = 0,
        abort_after: int = sys.maxsize,
        lora_request: LoRARequest | None = None,
        **params: Any,
    ) -> None:
        params = {"temperature": 0, "ignore_eos": True} | params
        self.prompt, self.arrives, self.abort_after = prompt, arrives, abort_after
        self.lora_request = lora_request
        self.params = SamplingParams(max_tokens=max_tokens, **params)


@dataclass
class Served:
    """What requests were answered.

    Attributes:
        outputs: by request.
        counters: what was added to vLLM's counters, one number for each value of a
            label, by name.
        drafts: recorded ones: number of the request, number of tokens known before
            them, and tokens.
    """

    outputs: list[RequestOutput]
    counters: dict[str, list[int]]
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)

    @property
    def tokens(self) -> list[list[int]]:
        """Of each request's first output."""
        return [list(one.outputs[0].token_ids) for one in self.outputs]

    def count(self, name: str) -> int:
        """A counter without labels."""
        return self.counters[name][0]

    def texts(self, requests: list[Request]) -> list[list[int]]:
        """Token ids of each request's prompt and output."""
        return [a.prompt + b for a, b in zip(requests, self.tokens, strict=True)]


class VllmRunner(AbstractContextManager):
    """An engine in another process, until the context ends.

    Raises:
        EngineError: it did not start.
    """

    def __init__(
        self,
        context: BaseContext,
        log: Path,
        env: dict[str, str],
        setup: list[Setup],
        arguments: dict[str, Any],
    ) -> None:
        self._log = log
        self._connection, remote = context.Pipe()
        given = (remote, log, env, setup, ENGINE | arguments)
        self.process = context.Process(target=run_engine, args=given)
        with START, mock.patch.dict(os.environ, env):
            self.process.start()
        remote.close()
        self._result()
        assert "Using V2 Model Runner" in self.log

    def __exit__(self, *_: Any) -> None:
        self._connection.close()
        self.process.join(30)
        self.process.kill()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _result(self) -> Any:
        try:
            error, result = self._connection.recv()
        except EOFError:
            error, result = "the engine's process ended", None
        if error:
            print(self.log[-6000:])
            raise EngineError(error)
        return result

    def call(self, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Result of `function(engine, *args, **given)`, called in its process.

        The first argument is the `Engine`; all others, and the result, are pickled.
        """
        self._connection.send((function, args, given))
        return self._result()

    def watch(self, kind: type, *args: Any) -> None:
        """Makes a `kind(engine, *args)`, which `found` reads."""
        self.call(Engine.watch, kind, *args)

    def found(self, kind: type) -> Any:
        """What a watch has found."""
        return self.call(Engine.found, kind)

    def generate(self, requests: list[Request]) -> Served:
        """Answers requests, and checks that they leave no KV cache block behind."""
        return self.call(Engine.generate, requests)


class Engine:
    """An engine, as seen from its own process."""

    def __init__(self, setup: list[Setup], arguments: dict[str, Any]) -> None:
        if arguments["async_scheduling"]:
            force_async_scheduling()
        self.setup = [each() for each in setup]
        self.llm = LLM(**arguments)
        # The engine core runs in this process, as does its worker if there is only one.
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        is_async = isinstance(self.scheduler, AsyncScheduler)
        assert is_async == arguments["async_scheduling"]
        self.worker = getattr(self.core.model_executor, "driver_worker", None)
        self.watches: dict[type, Any] = {}
        self.after_step: list[Callable[[int], None]] = []
        self.steps = 0
        self.unused = self.free_blocks()

    @property
    def speculator(self) -> Any:
        return self.worker.model_runner.speculator

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def watch(self, kind: type, *args: Any) -> None:
        self.watches[kind] = kind(self, *args)

    def found(self, kind: type) -> Any:
        return self.watches[kind].found

    def step(self) -> list[RequestOutput]:
        outputs = self.llm.llm_engine.step()
        self.steps += 1
        for act in self.after_step:
            act(self.steps)
        return outputs

    def counters(self) -> dict[str, list[int]]:
        found: defaultdict[str, list[int]] = defaultdict(list)
        for metric in self.llm.get_metrics():
            if metric.name.startswith(COUNTERS) and not isinstance(metric, Gauge):
                name = metric.name.removeprefix("vllm:").removeprefix("spec_decode_")
                found[name] += getattr(metric, "values", [getattr(metric, "value", 0)])
        return found

    def served(self, answer: Callable[[], list[RequestOutput]]) -> Served:
        """Runs `answer`, and counts what it does."""
        before = self.counters()
        outputs, after = answer(), self.counters()
        assert self.free_blocks() == self.unused, "KV cache blocks leaked"
        counters = {
            name: [
                new - old for new, old in zip(after[name], before[name], strict=True)
            ]
            for name in after
        }
        taken = [w.take() for w in self.watches.values() if hasattr(w, "take")]
        return Served(outputs, counters, *taken)

    def generate(self, requests: list[Request]) -> Served:
        return self.served(lambda: self._answer(requests))

    def _answer(self, requests: list[Request]) -> list[RequestOutput]:
        engine, first = self.llm.llm_engine, self.steps
        waiting = {str(number): each for number, each in enumerate(requests)}
        outputs: dict[str, RequestOutput] = {}
        while waiting or engine.has_unfinished_requests():
            for name, each in list(waiting.items()):
                if each.arrives <= self.steps - first:
                    del waiting[name]
                    engine.add_request(
                        name,
                        each.prompt
                        if isinstance(each.prompt, dict)
                        else {"prompt_token_ids": each.prompt},
                        each.params,
                        lora_request=each.lora_request,
                    )
            for output in self.step():
                asked = requests[int(output.request_id)]
                keep(outputs, output, asked.params)
                enough = len(output.outputs[0].token_ids) >= asked.abort_after
                if enough and not output.finished:
                    engine.abort_request([output.request_id])
        return [outputs[str(number)] for number in range(len(requests))]


def keep(
    outputs: dict[str, RequestOutput], new: RequestOutput, params: SamplingParams
) -> None:
    """Adds a request's new output to the one before, as `AsyncLLM` does."""
    name, is_delta = new.request_id, params.output_kind == RequestOutputKind.DELTA
    if name not in outputs:
        outputs[name] = new
        return
    outputs[name].add(new, aggregate=is_delta)
    outputs[name].outputs.sort(key=lambda each: each.index)


def force_async_scheduling() -> None:
    """Turns asynchronous scheduling on, which the CPU platform turns off."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_async(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    platform.check_and_update_config = staticmethod(check_async)


def run_engine(
    connection: Connection,
    log: Path,
    env: dict[str, str],
    setup: list[Setup],
    arguments: dict[str, Any],
) -> None:
    """Main function of an engine's process: runs what `VllmRunner.call` sends."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= env
    gc.freeze()  # otherwise the engine's GC traverses all imported modules
    engine = None

    def send(call: Callable[[], Any]) -> bool:
        try:
            answer = None, call()
        except Exception as error:
            traceback.print_exc()
            answer = f"{type(error).__name__}: {error}", None
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)
        return answer[0] is None

    def start() -> None:
        nonlocal engine
        engine = Engine(setup, arguments)

    is_running = send(start)
    while is_running:
        try:
            function, args, given = connection.recv()
        except EOFError:
            break
        send(lambda: function(engine, *args, **given))  # noqa: B023
    if engine and engine.worker is None:
        engine.core.shutdown()
    os._exit(0)  # without waiting for the engine's threads
