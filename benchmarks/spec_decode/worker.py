# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own, told what to do by lines of JSON.

The first line is the engine's arguments, every later one a command. Each is answered
by one line, `{"error": ...}` where it failed. What the engine prints goes to stderr.
"""

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

# From so many tokens on, computing prompts would stand beside the steps to measure.
LONG_PROMPT = 1024
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


class Worker:
    """Rounds of requests on an in-process LLM.

    Args:
        is_replayed: what is accepted is recorded, see `trace_acceptance.py`.
    """

    def __init__(self, engine: dict[str, Any], device: str, is_replayed: bool):
        from benchmarks.spec_decode.captures import Captures
        from benchmarks.spec_decode.drafter import DraftClock, find_drafter
        from benchmarks.spec_decode.heads import give_heads_their_own_lm_head
        from benchmarks.spec_decode.trace_acceptance import replay_in_every_runner
        from vllm import LLM

        give_heads_their_own_lm_head()
        replays = replay_in_every_runner() if is_replayed else []
        self.captures = Captures()
        begin = time.perf_counter()
        self.llm = LLM(**engine)
        self.start_s = time.perf_counter() - begin
        self.device = device
        # In process, so the runner itself comes back.
        self.runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self.replay = replays[0] if replays else None
        self.drafter = find_drafter(self.runner)
        self.clock = DraftClock(self.drafter, device) if self.drafter else None
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()
        self.random = random.Random(0)
        self.num_requests = 0

    def describe(self) -> dict[str, Any]:
        import torch

        import vllm
        from benchmarks.spec_decode.drafter import (
            bytes_read,
            count_full_graphs,
            draft_bytes_read,
            drafter_name,
        )

        homes = {base.__module__ for base in type(self.runner).__mro__}
        is_v2 = any("worker.gpu.model_runner" in home for home in homes)
        config = self.llm.llm_engine.vllm_config
        return {
            "runner": "V2" if is_v2 else "V1",
            "drafter": drafter_name(self.drafter),
            "target_bytes": bytes_read(self.runner.model),
            "draft_bytes": draft_bytes_read(self.drafter),
            "target_full_graphs": count_full_graphs(self.runner, "cudagraph_manager"),
            "draft_full_graphs": count_full_graphs(self.drafter, "graphs"),
            "graph_capture": self.captures.found,
            "start_s": self.start_s,
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        }

    def measure(
        self,
        concurrency: int,
        prompt_len: int,
        output_len: int,
        acceptance_rates: list[float],
        recording: str | None = None,
        number: int = 0,
        num_drafts: int | None = None,
    ) -> dict[str, Any]:
        """One round; see README.md for what comes back.

        Args:
            number: of the round, which begins elsewhere in the recording.
            num_drafts: how much is drafted, where the engine serves several numbers.
        """
        from benchmarks.spec_decode.rounds import (
            find_steady,
            seconds_to_first_tokens,
            time_per_output_token,
        )

        if num_drafts is not None:
            self._draft(num_drafts)
        self._accept(acceptance_rates, recording, number)
        prompts = self._prompts(concurrency, prompt_len)
        before, begin = self._counters(), time.perf_counter()
        steps = list(self._run(prompts, output_len))
        seconds = steps[-1].time - begin
        steady = find_steady(steps, concurrency)
        draft_s, drafted = None, {}
        if self.clock:
            span = (steady.begin, steady.end) if steady else (begin, steps[-1].time)
            draft_s, drafted = self.clock.read(*span)
        counted = {k: v - before[k] for k, v in self._counters().items()}
        return {
            "tokens_per_s": sum(sum(s.tokens.values()) for s in steps) / seconds,
            "tpot_s": time_per_output_token(steps),
            "prefill_s": seconds_to_first_tokens(steps, begin, concurrency),
            "step_s": steady and steady.step_s,
            "mean_step_s": steady and steady.mean_step_s,
            "steady_steps": steady.num_steps if steady else 0,
            "tokens_per_step": steady and steady.tokens_per_step,
            "draft_s": draft_s,
            "drafted": drafted,
            "counted_acceptance_length": _acceptance_length(counted),
            "seconds": seconds,
        }

    def profile(
        self,
        concurrency: int,
        prompt_len: int,
        output_len: int,
        num_steps: int,
        acceptance_rates: list[float],
        recording: str | None = None,
    ) -> dict[str, Any]:
        """A profile of `num_steps` steps in the middle of a round."""
        from benchmarks.spec_decode.gpu_profile import ProfileWindow, summarise

        self._accept(acceptance_rates, recording)
        window = ProfileWindow(num_steps)
        seen: set[str] = set()
        prompts = self._prompts(concurrency, prompt_len)
        for step in self._run(prompts, output_len):
            window.after_step(is_steady=len(seen) == concurrency)
            seen |= step.tokens.keys()
        if self.clock:
            self.clock.read(0.0, 0.0)
        if window.trace is None:
            raise ValueError(f"no {num_steps} steady steps: raise --output-len")
        return summarise(window.trace, num_steps)

    def _draft(self, num_drafts: int) -> None:
        """Has every step draft so much, if the engine has a schedule."""
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        if scheduler.dynamic_sd_lookup is not None:
            size = len(scheduler.dynamic_sd_lookup)
            scheduler.dynamic_sd_lookup = [num_drafts] * size

    def _accept(
        self, rates: list[float], recording: str | None, number: int = 0
    ) -> None:
        from benchmarks.spec_decode.drafter import set_acceptance
        from benchmarks.spec_decode.traces import Trace

        if self.replay is not None:
            self.replay.load(Trace.load(recording), number)
        elif self.drafter is not None:
            set_acceptance(self.runner, rates)

    def _prompts(self, concurrency: int, length: int) -> list[list[int]]:
        """Prompts that no other round has; long ones are in the KV cache already."""
        prompts = [
            [self.random.randrange(5, self.vocab) for _ in range(length)]
            for _ in range(concurrency)
        ]
        if length >= LONG_PROMPT:
            for _ in self._run(prompts, 1):
                pass
        return prompts

    def _run(self, prompts: list[list[int]], output_len: int) -> Iterator[Any]:
        """Yields the steps of requests that arrive together."""
        from benchmarks.spec_decode.rounds import Step
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        sampling = SamplingParams(
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

    def _counters(self) -> dict[str, float]:
        prefix = "vllm:spec_decode_"
        return {
            metric.name.removeprefix(prefix): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.removeprefix(prefix) in COUNTERS
        }


def _acceptance_length(counted: dict[str, float]) -> float | None:
    drafts = counted.get("num_drafts")
    return 1 + counted["num_accepted_tokens"] / drafts if drafts else None


def serve() -> None:
    """Answers commands until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    try:
        worker = Worker(**job)
        print(json.dumps(worker.describe()), file=channel)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=channel)
        raise
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("command"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=channel)


if __name__ == "__main__":
    serve()
