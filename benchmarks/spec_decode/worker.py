# SPDX-License-Identifier: Apache-2.0
"""An engine of this tree or of vLLM's release, in a process of its own: rounds whose
steps are timed, and replayed acceptance."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from statistics import mean, median
from typing import Any, NamedTuple

import torch

import vllm.benchmarks
from benchmarks.spec_decode.models import ROOT, complete_dummy_heads
from benchmarks.spec_decode.trace_acceptance import replacing, replay_in
from benchmarks.spec_decode.traces import Trace
from vllm.sampling_params import RequestOutputKind

# The release lacks this package.
vllm.benchmarks.__path__.append(str(ROOT / "vllm/benchmarks"))
drafters = import_module("vllm.benchmarks.drafters.engine")
# From this length on, prefill would take too much of a round: prompts are cached first.
LONG_PROMPT = 1024


class Step(NamedTuple):
    """One engine step that returned tokens.

    Attributes:
        time: when the step returned, in seconds.
        tokens: new tokens by request.
        finished: whether a request finished in it.
    """

    time: float
    tokens: dict[str, int]
    finished: bool


def steady_part(steps: list[Step], concurrency: int) -> list[Step]:
    """The steps in a row in which all requests decode and none finishes; none if they
    are fewer than three."""
    seen: set[str] = set()
    run: list[Step] = []
    for step in steps:
        decoding = len(seen) == concurrency == len(step.tokens)
        seen |= step.tokens.keys()
        if decoding and not step.finished:
            run.append(step)
        elif run:
            break
    return run if len(run) > 2 else []


def summary(run: list[Step], concurrency: int) -> dict[str, Any]:
    """What README.md says of a steady part, whose first step is left out."""
    durations = [after.time - before.time for before, after in pairwise(run)]
    tokens = sum(sum(step.tokens.values()) for step in run[1:])
    return {
        "step_s": median(durations) if run else None,
        "mean_step_s": mean(durations) if run else None,
        "tokens_per_step": tokens / len(durations) / concurrency if run else None,
        "steady_steps": len(durations),
    }


class DraftClock:
    """Times every `propose` on the device, without synchronizing."""

    def __init__(self, drafter: Any):
        self.is_cuda = torch.cuda.is_available()
        self.calls: list[tuple[float, int | None, Any, Any]] = []

        @replacing(drafter, "propose")
        def timed(propose, *args, **kwargs):
            called, begin = time.perf_counter(), self._mark()
            drafts = propose(*args, **kwargs)
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


class Worker(drafters.Engine):
    """Rounds of requests that arrive together.

    Args:
        engine: arguments of `LLM`.
        is_replayed: acceptance is replayed, see `trace_acceptance.py`.
    """

    def __init__(self, engine: dict[str, Any], is_replayed: bool):
        complete_dummy_heads()
        super().__init__(**engine)
        # In-process, so this returns the runner object itself.
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self.replay = replay_in(self.runner) if is_replayed else None
        self.replayed: str | None = None
        # Runner V2's speculator, Runner V1's drafter.
        self.drafter = getattr(self.runner, "speculator", None)
        self.drafter = self.drafter or getattr(self.runner, "drafter", None)
        self.clock = DraftClock(self.drafter) if self.drafter else None
        self.num_requests = 0
        # What chooses draft lengths; None: the engine does not, or is of the release.
        steps = getattr(self.scheduler, "step_drafts", None)
        self.policy = steps and steps.policy

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

    def time_steps(self) -> None:
        """Measures the step times for "auto" again, now that all engines are up."""
        from vllm.v1.core.sched.draft_policy import DraftPolicy
        from vllm.v1.spec_decode.auto.measure import measure_steps

        core = self.llm.llm_engine.engine_core.engine_core
        measure_steps(core.model_executor, reuse=False)
        self.policy = DraftPolicy.of(self.scheduler)
        self.draft(None)

    def draft(self, num_drafts: int | None) -> None:
        """Sets how much is drafted from now on: a chain's length, or a tree's nodes;
        None: what the engine chooses."""
        self.scheduler.step_drafts.policy = self.policy if num_drafts is None else None
        if num_drafts is not None:
            most = self.scheduler.max_num_running_reqs
            self.scheduler.dynamic_sd_lookup = [num_drafts] * (most + 1)

    def measure(
        self,
        number: int,
        concurrency: int,
        prompt_len: int,
        output_len: int,
        recording: str | None,
        num_drafts: int | None,
    ) -> dict[str, Any]:
        """Measures one round of requests; README.md has the results.

        Args:
            number: seeds the prompts, which are the same for all engines.
            recording: to replay; unused if the engine replays none.
            num_drafts: see `draft`; unused if the engine does not choose.
        """
        if self.policy is not None:
            self.draft(num_drafts)
        if self.replay is not None and recording != self.replayed:
            self.replay.load(Trace.load(recording))
            self.replayed = recording
        rng, vocab = random.Random(number), self.llm.llm_engine.model_config
        prompts = [
            [rng.randrange(5, vocab.get_vocab_size()) for _ in range(prompt_len)]
            for _ in range(concurrency)
        ]
        if prompt_len >= LONG_PROMPT:  # then they are in the prefix cache
            list(self.steps(prompts, 1))
        begin = time.perf_counter()
        steps = list(self.steps(prompts, output_len))
        run = steady_part(steps, len(prompts))
        found = summary(run, len(prompts)) | {"draft_s": None, "drafted": {}}
        if self.clock:
            span = (run[0].time if run else begin), (run or steps)[-1].time
            found["draft_s"], found["drafted"] = self.clock.read(*span)
        tokens = sum(sum(step.tokens.values()) for step in steps)
        return found | {"tokens_per_s": tokens / (steps[-1].time - begin)}

    def steps(self, prompts: list[list[int]], output_len: int) -> Iterator[Step]:
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
            if outputs := engine.step():
                tokens = {o.request_id: len(o.outputs[0].token_ids) for o in outputs}
                ended = any(output.finished for output in outputs)
                yield Step(time.perf_counter(), tokens, ended)


def serve(number: int) -> None:
    drafters.serve_engine(number, Worker)
