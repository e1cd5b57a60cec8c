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
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

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
# For engines with two ranks: each has a GPU, or else a core of the CPU.
CORES = sorted(os.sched_getaffinity(0))
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else len(CORES)
# Only used on a CPU; without it each rank needs its own NUMA node.
BOUND = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
Setup = Callable[[], Any]
START = threading.Lock()  # the environment belongs to all threads


class EngineError(Exception):
    """An engine did not start, or a function failed in it; its log is printed."""


class Request:
    """A request, greedy by default, and after how many tokens it is aborted."""

    def __init__(
        self,
        prompt: Any,  # token ids, or another of vLLM's prompts
        max_tokens: int,
        abort_after: int = sys.maxsize,
        lora_request: LoRARequest | None = None,
        **params: Any,
    ) -> None:
        params = {"temperature": 0, "ignore_eos": True} | params
        self.prompt, self.abort_after = prompt, abort_after
        self.lora_request = lora_request
        self.params = SamplingParams(max_tokens=max_tokens, **params)


@dataclass
class Served:
    """What requests were answered."""

    outputs: list[RequestOutput]
    # What was added to vLLM's counters, by name, for each value of a label.
    counters: dict[str, list[int]]
    # Recorded ones: number of the request, number of tokens known before, and tokens.
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
    """An engine in another process, until the context ends; or an EngineError."""

    def __init__(
        self,
        context: BaseContext,
        log: Path,
        env: dict[str, str],
        setup: list[Setup],
        arguments: dict[str, Any],
    ) -> None:
        self._log = log
        self._process = ProcessPoolExecutor(1, context)
        with START, mock.patch.dict(os.environ, env):
            started = self._submit(start_engine, log, env, setup, ENGINE | arguments)
        try:
            self._result(started)
        except BaseException:
            self.__exit__()
            raise
        assert "Using V2 Model Runner" in self.log

    def __exit__(self, *_: Any) -> None:
        with suppress(BrokenProcessPool):
            self._submit(end_process)
        self._process.shutdown()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def _submit(self, *call: Any, **given: Any) -> Future:
        return self._process.submit(run_in_engine, *call, **given)

    def _result(self, future: Future) -> Any:
        try:
            return future.result()
        except Exception:
            print(self.log[-6000:])
            raise

    def call(self, function: Callable[..., Any], *args: Any, **given: Any) -> Any:
        """Result of `function(engine, *args, **given)`, called in its process.

        The first argument is the `Engine`; all others, and the result, are pickled.
        """
        return self._result(self._submit(function, *args, **given))

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

    running: "Engine | None" = None

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
        engine, outputs = self.llm.llm_engine, {}
        for number, each in enumerate(requests):
            is_plain = isinstance(each.prompt, list)
            prompt = {"prompt_token_ids": each.prompt} if is_plain else each.prompt
            lora = each.lora_request
            engine.add_request(str(number), prompt, each.params, lora_request=lora)
        while engine.has_unfinished_requests():
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


def run_in_engine(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    try:
        return function(Engine.running, *args, **given)
    except Exception as error:
        traceback.print_exc()
        # Not all errors can be pickled.
        raise EngineError(f"{type(error).__name__}: {error}") from None


def start_engine(
    _: None, log: Path, env: dict[str, str], setup: list[Setup], arguments: Any
) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ |= env
    gc.freeze()  # otherwise the engine's GC traverses all imported modules
    Engine.running = Engine(setup, arguments)


def end_process(engine: Engine | None) -> None:
    """Ends the process without waiting for the engine's threads."""
    if engine and engine.worker is None:
        engine.core.shutdown()
    os._exit(0)
