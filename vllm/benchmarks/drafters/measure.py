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
        engines: sides by engine, no speculation first.
        prompts: token ids.
        sampling: arguments of `SamplingParams`; greedy.
        loads: number of requests in a round, by concurrency.
        repeats: rounds of each side and load.
        in_turns: whether the engine without speculation is kept, and takes turns with
            each drafter, round by round.
        logs: folder for the engines' logs.
        save: is called after each point, and after each engine.
        sides: those whose engine started, no speculation first.
        failed: by name, why a side could not be measured.
        not_reached: names of sides that were not measured to their end, as long as the
            measurement is going on, or was cut off.
        within: logprobs this close are a tie, in nats.
    """

    llm: dict[str, Any]
    engines: list[list[Side]]
    prompts: list[list[int]]
    sampling: dict[str, Any]
    loads: Mapping[int, int]
    repeats: int
    in_turns: bool
    logs: Path
    save: Callable[[], None] = lambda: None
    sides: list[Side] = field(default_factory=list)
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
        self.not_reached = [side.name for sides in self.engines for side in sides]
        self.progress = Progress(self.engines)
        try:
            for number, sides in enumerate(self.engines):
                try:
                    self._run_engine(number)
                except EngineError as error:
                    if not number:
                        raise
                    self.failed |= {side.name: str(error) for side in sides}
                self.not_reached = self.not_reached[len(sides) :]
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
        engine = self.llm | {"speculative_config": self.engines[number][0].spec}
        env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        log = self.logs / f"engine-{number}.log"
        self.processes.append(EngineProcess(PYTHON, SERVE, engine, env, log))
        return self.processes[-1]

    def _run_engine(self, number: int) -> None:
        sides, later = self.engines[number], None
        started = [each for each in self.processes if each is not self.beside]
        process = started[0] if started else self._start_process(number)
        try:
            self.progress.say(sides[0].name, "starting")
            if number + 1 < len(self.engines):
                # It imports while this engine starts, and nothing is measured.
                later = self._start_process(number + 1)
            about = process.ask("describe")
            if later is not None:
                later.wait_for_imports()
            self.within = max(self.within, tolerance(about["dtype"]))
            self.sides += sides
            for side in sides:
                side.engine = about
            self._measure_engine(process, sides)
        except EngineError:
            self._stop([process], wait_s=0)
            raise
        if process is not self.beside:
            self._stop([process])

    def _measure_engine(self, process: EngineProcess, sides: list[Side]) -> None:
        is_first = not self.expected
        if is_first:
            how = {"logprobs": NUM_LOGPROBS}
            most = max(self.loads)
            self.expected = self._run(process, sides[0], most, **how).answers
            self.beside = process if self.in_turns else None
        # At the highest load "auto" learns what is accepted in the fewest steps.
        for load in sorted(self.loads, reverse=True):
            here = [side for side in sides if side.is_measured_at(load)]
            for side in here:  # so that nothing has to be compiled later
                self.progress.say(side.name, f"{load} at a time")
                self._run(process, side, load, load, **WARM_UP)
            for side in here * self.repeats:
                self._measure(process, side, load)
                self.save()
        if is_first:
            # The target differs from itself by this: elsewhere it may be rounding too.
            gaps = [each.gap for each in sides[0].comparison.errors]
            self.within = max([self.within, *(g for g in gaps if g < float("inf"))])

    def _measure(self, process: EngineProcess, side: Side, load: int) -> None:
        """One round, after one without speculation if there is an engine for it."""
        number = self.loads[load]
        if self.beside not in (None, process):
            found = self._run(self.beside, self.engines[0][0], load, number)
            side.beside.setdefault(load, []).append(found)
        found = self._run(process, side, load, number)
        side.rounds.setdefault(load, []).append(found)
        if side.is_lossless:
            side.comparison.add(self.expected, found.answers, self.within)

    def _run(
        self,
        process: EngineProcess,
        side: Side,
        load: int,
        number: int | None = None,
        **sampling: Any,
    ) -> Round:
        """A round of so many requests, None: of one for each prompt."""
        prompts = islice(cycle(self.prompts), number or len(self.prompts))
        how = {"sampling": self.sampling | sampling, "num_drafts": side.num_drafts}
        return process.ask("run", prompts=list(prompts), load=load, **how)


class Progress:
    """Prints what is measured, and how long the rest takes if every side to come takes
    as long as the slowest drafter's so far."""

    def __init__(self, engines: list[list[Side]]):
        self.engines, self.begin = engines, time.monotonic()
        self.done, self.ended, self.slowest = 0, self.begin, 0.0

    def say(self, name: str, what: str) -> None:
        parts = [f"{time.monotonic() - self.begin:4.0f} s"]
        parts.append(f"engine {self.done + 1} of {len(self.engines)}")
        if self.slowest:
            left = sum(map(len, self.engines[self.done :])) * self.slowest
            parts.append(f"at most {left / 60:.0f} min left")
        print(f"[{', '.join(parts)}] {name}: {what}", file=sys.stderr)

    def end_engine(self) -> None:
        sides, now = self.engines[self.done], time.monotonic()
        if sides[0].spec is not None:
            self.slowest = max(self.slowest, (now - self.ended) / len(sides))
        self.done, self.ended = self.done + 1, now
