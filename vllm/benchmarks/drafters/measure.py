# SPDX-License-Identifier: Apache-2.0
"""Runs engines one after the other, and collects their results."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm.benchmarks.drafters.compare import NUM_LOGPROBS, tolerance
from vllm.benchmarks.drafters.engine import Answer, Round
from vllm.benchmarks.drafters.plan import Side
from vllm.benchmarks.drafters.processes import STOP_S, EngineError, EngineProcess

PYTHON = [sys.executable, "-P"]
SERVE = "vllm.benchmarks.drafters.engine", "serve"
WARM_UP = {"max_tokens": 8, "ignore_eos": True}


@dataclass
class Measurement:
    """What is to be measured, and what was.

    Attributes:
        llm: arguments of `LLM` besides the speculative config.
        sides: no speculation first.
        prompts: token ids.
        sampling: arguments of `SamplingParams`; greedy.
        loads: number of requests in a round, by concurrency.
        repeats: rounds of each side and load.
        logs: folder for the engines' logs.
        save: is called after each point, and after each engine.
        starts_together: whether all engines start at once, if they are so small that
            the device holds all of them.
        failed: by name, why a side could not be measured.
        not_reached: names of sides that were not measured to their end, as long as the
            measurement is going on, or was cut off.
        within: logprobs this close are a tie, in nats.
    """

    llm: dict[str, Any]
    sides: list[Side]
    prompts: list[list[int]]
    sampling: dict[str, Any]
    loads: Mapping[int, int]
    repeats: int
    logs: Path
    save: Callable[[], None] = lambda: None
    starts_together: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    not_reached: list[str] = field(default_factory=list)
    within: float = 0.0

    def run(self) -> None:
        """Measures everything.

        Raises:
            EngineError: the engine without speculation failed, so that there is nothing
                to compare with.
        """
        self.expected: list[Answer] = []
        self.begin = time.monotonic()
        self.not_reached = [side.name for side in self.sides]
        waiting: list[EngineProcess] = []  # started, but not measured yet
        try:
            if self.starts_together:
                self._say(self.sides[0], "starting, with all others")
                waiting += map(self._start_process, range(len(self.sides)))
                for process in waiting:  # none is measured while another starts
                    process.wait()
            for number, side in enumerate(self.sides):
                self._say(side, "starting")
                process = waiting.pop(0) if waiting else self._start_process(number)
                self._measure_process(process, side)
                self.not_reached.pop(0)
                self.save()
        finally:
            for process in waiting:
                process.stop(0.0)

    def _start_process(self, number: int) -> EngineProcess:
        engine = self.llm | {"speculative_config": self.sides[number].spec}
        log = self.logs / f"engine-{number}.log"
        process = EngineProcess(PYTHON, SERVE, engine, dict(os.environ), log)
        process.send(("describe", {}))
        return process

    def _measure_process(self, process: EngineProcess, side: Side) -> None:
        wait_s = 0.0
        try:
            self._measure_engine(process, side)
            wait_s = STOP_S
        except EngineError as error:
            if side is self.sides[0]:
                raise
            self.failed[side.name] = str(error)
        finally:
            process.stop(wait_s)

    def _measure_engine(self, process: EngineProcess, side: Side) -> None:
        side.engine = process.answer()
        self.within = max(self.within, tolerance(side.engine["dtype"]))
        is_first = not self.expected
        if is_first:
            logprobs = {"logprobs": NUM_LOGPROBS}
            self.expected = self._run(process, max(self.loads), **logprobs).answers
        # At the highest load "auto" learns what is accepted in the fewest steps.
        for load in sorted(self.loads, reverse=True):
            self._say(side, f"{load} at a time")
            self._run(process, load, load, **WARM_UP)  # compiles what a batch needs
            for _ in range(self.repeats):
                found = self._run(process, load, self.loads[load])
                side.rounds.setdefault(load, []).append(found)
                if side.is_lossless:
                    side.comparison.add(self.expected, found.answers, self.within)
                self.save()
        if is_first:
            # The target differs from itself by this: elsewhere it may be rounding too.
            gaps = [each.gap for each in side.comparison.errors]
            self.within = max([self.within, *(g for g in gaps if g < float("inf"))])

    def _run(
        self,
        process: EngineProcess,
        load: int,
        number: int | None = None,
        **sampling: Any,
    ) -> Round:
        """A round of so many requests, None: of one for each prompt."""
        prompts = [*islice(cycle(self.prompts), number or len(self.prompts))]
        how = self.sampling | sampling
        return process.ask("run", prompts=prompts, sampling=how, load=load)

    def _say(self, side: Side, what: str) -> None:
        number = len(self.sides) - len(self.not_reached) + 1
        where = f"{time.monotonic() - self.begin:4.0f} s"
        where += f", engine {number} of {len(self.sides)}"
        print(f"[{where}] {side.name}: {what}", file=sys.stderr)
