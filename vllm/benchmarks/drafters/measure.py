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
from vllm.benchmarks.drafters.processes import EngineError, EngineProcess

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
        in_turns: whether the engine without speculation is kept, and takes turns with
            each drafter, round by round.
        logs: folder for the engines' logs.
        save: is called after each point, and after each engine.
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
    in_turns: bool
    logs: Path
    save: Callable[[], None] = lambda: None
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
        self.processes: list[EngineProcess] = []  # that run
        self.beside: EngineProcess | None = None
        self.not_reached = [side.name for side in self.sides]
        self.progress = Progress(len(self.sides))
        try:
            for number, side in enumerate(self.sides):
                try:
                    self._run_engine(number)
                except EngineError as error:
                    if not number:
                        raise
                    self.failed[side.name] = str(error)
                self.not_reached.pop(0)
                self.progress.end_engine()
                self.save()
            self._stop(self.processes)
        finally:
            self._stop(self.processes, wait_s=0)

    def _stop(self, processes: list[EngineProcess], **how: float) -> None:
        for process in [*processes]:
            process.stop(**how)
            self.processes.remove(process)

    def _start_process(self, number: int) -> EngineProcess:
        engine = self.llm | {"speculative_config": self.sides[number].spec}
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = self.logs / f"engine-{number}.log"
        self.processes.append(EngineProcess(PYTHON, SERVE, engine, env, log))
        return self.processes[-1]

    def _run_engine(self, number: int) -> None:
        side, later = self.sides[number], None
        started = [each for each in self.processes if each is not self.beside]
        process = started[0] if started else self._start_process(number)
        try:
            self.progress.say(side.name, "starting")
            if number + 1 < len(self.sides):
                # It imports while this engine starts, and nothing is measured.
                later = self._start_process(number + 1)
            side.engine = process.ask("describe")
            if later is not None:
                later.wait_for_imports()
            self._measure_engine(process, side)
        except EngineError:
            self._stop([process], wait_s=0)
            raise
        if process is not self.beside:
            self._stop([process])

    def _measure_engine(self, process: EngineProcess, side: Side) -> None:
        self.within = max(self.within, tolerance(side.engine["dtype"]))
        is_first, most = not self.expected, max(self.loads)
        if is_first:
            logprobs = {"logprobs": NUM_LOGPROBS}
            self.expected = self._run(process, most, **logprobs).answers
            self.beside = process if self.in_turns else None
        # At the highest load "auto" learns what is accepted in the fewest steps.
        for load in sorted(self.loads, reverse=True):
            self.progress.say(side.name, f"{load} at a time")
            self._run(process, load, load, **WARM_UP)  # compiles what a batch needs
            for _ in range(self.repeats):
                self._measure(process, side, load)
                self.save()
        if is_first:
            # The target differs from itself by this: elsewhere it may be rounding too.
            gaps = [each.gap for each in side.comparison.errors]
            self.within = max([self.within, *(g for g in gaps if g < float("inf"))])

    def _measure(self, process: EngineProcess, side: Side, load: int) -> None:
        """One round, after one without speculation if there is an engine for it."""
        number = self.loads[load]
        if self.beside not in (None, process):
            found = self._run(self.beside, load, number)
            side.beside.setdefault(load, []).append(found)
        found = self._run(process, load, number)
        side.rounds.setdefault(load, []).append(found)
        if side.is_lossless:
            side.comparison.add(self.expected, found.answers, self.within)

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


class Progress:
    """Prints what is measured, and how long the rest takes if every engine to come
    takes as long as the slowest drafter's so far; that never gets longer."""

    def __init__(self, total: int):
        self.total, self.begin = total, time.monotonic()
        self.done, self.ended, self.slowest = 0, self.begin, 0.0
        self.end = float("inf")

    def say(self, name: str, what: str) -> None:
        now = time.monotonic()
        where = f"{now - self.begin:4.0f} s, engine {self.done + 1} of {self.total}"
        if now < self.end < float("inf"):
            where += f", about {(self.end - now) / 60:.0f} min left"
        print(f"[{where}] {name}: {what}", file=sys.stderr)

    def end_engine(self) -> None:
        now = time.monotonic()
        if self.done:  # the first one drafts nothing
            self.slowest = max(self.slowest, now - self.ended)
            left = (self.total - self.done - 1) * self.slowest
            self.end = min(self.end, now + left)
        self.done, self.ended = self.done + 1, now
