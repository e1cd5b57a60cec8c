# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, controlled through a pipe.

The first message has the arguments of `Worker`, every later one is a command. Each is
answered by one message, which is `{"error": ...}` if it failed.
"""

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

import vllm
from benchmarks.spec_decode.gpu_profile import profiled, summarise
from benchmarks.spec_decode.models import give_heads_their_own_lm_head
from benchmarks.spec_decode.rounds import Steady, Step, find_steady
from benchmarks.spec_decode.trace_acceptance import replay_in_every_runner
from benchmarks.spec_decode.traces import Trace
from vllm.sampling_params import RequestOutputKind

# From this length on, prefill would take too much of a round: prompts are cached first.
LONG_PROMPT = 1024
SKIPPED_STEPS = 5  # between the last prefill and a profile


class DraftClock:
    """Times every `propose` on the device, without synchronizing."""

    def __init__(self, drafter: Any):
        self.is_cuda = torch.cuda.is_available()
        self.calls: list[tuple[float, int | None, Any, Any]] = []
        self.propose = drafter.propose
        drafter.propose = self._timed

    def _timed(self, *args, **kwargs):
        called, begin = time.perf_counter(), self._mark()
        drafts = self.propose(*args, **kwargs)
        length = kwargs.get("num_speculative_tokens")
        self.calls.append((called, length, begin, self._mark()))
        return drafts

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, begin: float, end: float) -> tuple[float | None, dict[int, int]]:
        """Clears all calls, and summarizes those made between `begin` and `end`.

        Returns:
            Median seconds of a call, and the number of calls by draft length if the
            runner passes one.
        """
        if self.is_cuda:
            torch.cuda.synchronize()
        calls = [call for call in self.calls if begin <= call[0] <= end]
        self.calls.clear()
        seconds = [self._between(*marks) for _, _, *marks in calls]
        drafted = Counter(length for _, length, *_ in calls if length is not None)
        return median(seconds) if seconds else None, dict(drafted)

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.is_cuda else end - begin


class WaitClock:
    """Times how long the host waits for the outputs of Runner V2's steps: if it does
    not, the host is what takes the time, and not the device."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        self.waits: list[tuple[float, float]] = []
        get_output = AsyncOutput.get_output

        def timed(output: AsyncOutput) -> Any:
            begin = time.perf_counter()
            output.copy_event.synchronize()
            self.waits.append((begin, time.perf_counter() - begin))
            return get_output(output)

        AsyncOutput.get_output = timed

    def read(self, begin: float, end: float) -> float | None:
        """Clears all waits; the median seconds of those between `begin` and `end`."""
        found = [seconds for at, seconds in self.waits if begin <= at <= end]
        self.waits.clear()
        return median(found) if found else None


class Worker:
    """Rounds of requests on an in-process LLM.

    Args:
        is_replayed: acceptance is replayed, see `trace_acceptance.py`.
    """

    def __init__(self, engine: dict[str, Any], is_replayed: bool):
        give_heads_their_own_lm_head()
        replays = replay_in_every_runner() if is_replayed else []
        begin = time.perf_counter()
        self.llm = vllm.LLM(**engine)
        self.start_s = time.perf_counter() - begin
        # In-process, so this returns the runner object itself.
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self.replay = replays[0] if replays else None
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.policy = self.verifier = None
        # Runner V2's speculator, Runner V1's drafter.
        self.drafter = getattr(self.runner, "speculator", None)
        self.drafter = self.drafter or getattr(self.runner, "drafter", None)
        self.clock = DraftClock(self.drafter) if self.drafter else None
        self.waits = WaitClock()
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.num_requests = 0

    def describe(self) -> dict[str, Any]:
        """Versions, settings, start-up time, and FULL CUDA graphs if known."""
        config = self.llm.llm_engine.vllm_config
        managers = {
            "target": getattr(self.runner, "cudagraph_manager", None),
            "draft": getattr(self.drafter, "graphs", None),
        }
        return {
            f"{name}_full_graphs": None if manager is None else len(manager.graphs)
            for name, manager in managers.items()
        } | {
            "runner": type(self.runner).__module__,
            "drafter": type(getattr(self.drafter, "drafter", self.drafter)).__name__,
            "start_s": self.start_s,
            "reserved_bytes": torch.cuda.memory_reserved(),
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    def time_steps(self) -> dict[str, Any]:
        """Measures the step times for "auto" again, now that all engines are up."""
        from vllm.v1.core.sched.draft_policy import DraftPolicy
        from vllm.v1.spec_decode.auto.measure import measure_steps

        core = self.llm.llm_engine.engine_core.engine_core
        measure_steps(core.model_executor)
        self.policy = DraftPolicy.of(self.scheduler)
        self.verifier = self.policy.chooser.verifier
        self._draft(None, True)
        return {}

    def measure(
        self,
        concurrency: int,
        prompt_len: int,
        output_len: int,
        number: int,
        **accepted: Any,
    ) -> dict[str, Any]:
        """Measures one round; `number` seeds its prompts. README.md has the results."""
        self._accept(**accepted)
        prompts = self._prompts(number, concurrency, prompt_len)
        begin = time.perf_counter()
        steps = list(self._run(prompts, output_len))
        whole = Steady(begin, steps[-1].time)  # for short rounds without a steady part
        found = (find_steady(steps, concurrency) or whole)._asdict()
        span = found.pop("begin"), found.pop("end")
        found["wait_s"] = self.waits.read(*span)
        found["draft_s"], found["drafted"] = None, {}
        if self.clock:
            found["draft_s"], found["drafted"] = self.clock.read(*span)
        tokens = sum(sum(step.tokens.values()) for step in steps)
        return found | {"tokens_per_s": tokens / (steps[-1].time - begin)}

    def profile(
        self,
        concurrency: int,
        prompt_len: int,
        output_len: int,
        num_steps: int,
        **accepted: Any,
    ) -> dict[str, Any]:
        """Profiles `num_steps` steps in the middle of a round."""
        self._accept(**accepted)
        steps = self._run(self._prompts(0, concurrency, prompt_len), output_len)
        seen: set[str] = set()
        while len(seen) < concurrency:
            seen |= next(steps).tokens.keys()
        list(islice(steps, SKIPPED_STEPS))
        with profiled() as trace:
            taken = list(islice(steps, num_steps))
        is_short = len(taken) < num_steps or any(step.finished for step in taken)
        for _ in steps:
            pass
        if self.clock:
            self.clock.read(0.0, 0.0)
        if is_short:
            raise ValueError(f"no {num_steps} steady steps: raise --output-len")
        return summarise(trace, num_steps)

    def _accept(
        self, recording: str | None, told: tuple[int | None, bool] | None
    ) -> None:
        """Sets how much a round drafts and accepts.

        Args:
            recording: to replay; unused if the engine replays none.
            told: the arguments of `_draft` for a shared engine; None changes nothing.
        """
        if told is not None:
            self._draft(*told)
        if self.replay is not None:
            self.replay.load(Trace.load(recording))

    def _draft(self, num_drafts: int | None, is_adaptive: bool) -> None:
        """Sets how much is drafted, None: what the engine chooses, and whether it may
        verify only part of that."""
        policy = self.policy if is_adaptive or num_drafts is None else None
        if hasattr(self.scheduler, "step_drafts"):  # not in vLLM's release
            self.scheduler.step_drafts.policy = policy
        if policy is not None:
            policy.chooser.fixed = num_drafts
            policy.chooser.verifier = self.verifier if is_adaptive else None
        else:
            most = self.scheduler.max_num_running_reqs
            self.scheduler.dynamic_sd_lookup = [num_drafts] * (most + 1)

    def _prompts(self, number: int, concurrency: int, length: int) -> list[list[int]]:
        """Prompts of a round, equal for all engines; long ones are cached first."""
        rng = random.Random(number)
        prompts = [
            [rng.randrange(5, self.vocab) for _ in range(length)]
            for _ in range(concurrency)
        ]
        if length >= LONG_PROMPT:
            for _ in self._run(prompts, 1):
                pass
        return prompts

    def _run(self, prompts: list[list[int]], output_len: int) -> Iterator[Step]:
        """Runs requests that arrive together, and yields their steps."""
        engine = self.llm.llm_engine
        sampling = vllm.SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for prompt in prompts:
            self.num_requests += 1
            request = {"prompt_token_ids": prompt}
            engine.add_request(str(self.num_requests), request, sampling)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if outputs:
                tokens = {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
                ended = any(output.finished for output in outputs)
                yield Step(time.perf_counter(), tokens, ended)


def serve(pipe: Connection) -> None:
    """Answers messages until the other end of the pipe is closed."""
    worker = None
    with contextlib.suppress(EOFError):
        while True:
            message = pipe.recv()
            try:
                if worker is None:
                    worker = Worker(**message)
                    answer = worker.describe()
                else:
                    answer = getattr(worker, message.pop("command"))(**message)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            pipe.send(answer)


if __name__ == "__main__":
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    serve(Connection(number))
