# SPDX-License-Identifier: Apache-2.0
"""Runs the engines of a plan one after the other, and collects their results."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from vllm.benchmarks.drafters.compare import (
    NUM_LOGPROBS,
    SEEDED,
    Comparison,
    Expected,
    tolerance,
)
from vllm.benchmarks.drafters.engine import Round
from vllm.benchmarks.drafters.plan import (
    CHECK,
    MEASURE,
    EnginePlan,
    Setting,
    Task,
    plan_tasks,
)
from vllm.benchmarks.drafters.processes import (
    EngineError,
    EngineProcess,
    take_turns,
)
from vllm.benchmarks.drafters.progress import Progress
from vllm.benchmarks.drafters.prompts import Request
from vllm.engine.arg_utils import EngineArgs

START = "starting"


@dataclass
class Found:
    """The results of one setting of one drafter.

    Attributes:
        engine: see `Engine.describe`.
        rounds: by concurrency.
        beside: rounds without speculation that took turns with these, if any.
    """

    plan: EnginePlan
    setting: Setting
    engine: dict[str, Any]
    rounds: dict[int, list[Round]] = field(default_factory=dict)
    beside: dict[int, list[Round]] = field(default_factory=dict)
    comparison: Comparison = field(default_factory=Comparison)

    @property
    def name(self) -> str:
        return f"{self.plan.drafter} {self.setting.name}".rstrip()

    @property
    def is_drafting(self) -> bool:
        return self.plan.spec is not None

    def round(self, load: int) -> Round | None:
        return fastest(self.rounds.get(load, ()))


def fastest(rounds: Iterable[Round]) -> Round | None:
    """The fastest round: other load on a machine can only slow a round down."""
    return max(rounds, key=lambda found: found.tokens_per_s, default=None)


@dataclass
class Job:
    """What is to be measured.

    Attributes:
        loads: number of requests in a round, by concurrency.
        repeats: rounds of each setting and load.
        seeded_len: most tokens of a seeded output, which is only checked; None: as many
            as of a measured one.
        logs: folder for the engines' logs.
        tokenizer: the target's; None: it has none.
    """

    engine_args: EngineArgs
    plans: list[EnginePlan]
    requests: list[Request]
    loads: Mapping[int, int]
    repeats: int
    seeded_len: int | None
    ignore_eos: bool
    logs: Path
    tokenizer: Any = None


class Measurement:
    """Measures a job.

    Attributes:
        found: results of each setting, no speculation first.
        failed: by drafter and setting, why it could not be measured.
        within: logprobs this close are a tie, in nats.
    """

    def __init__(self, job: Job):
        self.job = job
        self.found: list[Found] = []
        self.failed: dict[str, str] = {}
        self.within = 0.0
        self.greedy: list[Expected] = []
        self.seeded: list[Expected] = []
        self.beside: tuple[EngineProcess, Found] | None = None
        self.next: EngineProcess | None = None  # started while another is measured
        self.tasks = [plan_tasks(p, job.loads, job.repeats) for p in job.plans]
        kinds = [self._kind(task) for tasks in self.tasks for task in tasks]
        self.progress = Progress(kinds + [START] * len(job.plans))

    def run(self) -> None:
        """Measures everything.

        Raises:
            EngineError: the engine without speculation failed, so that there is nothing
                to compare with.
        """
        try:
            for number in range(len(self.job.plans)):
                self._run_plan(number)
        finally:
            if self.next is not None:
                self.next.stop()
            if self.beside is not None:
                self.beside[0].stop()
        self.progress.bar.close()

    def _run_plan(self, number: int) -> None:
        plan, before = self.job.plans[number], self.progress.left.total()
        try:
            self._run_engine(number)
        except EngineError as error:
            if plan.is_reference:
                raise
            names = "/".join(setting.name for setting in plan.settings)
            self.failed[f"{plan.drafter} {names}"] = str(error)
            self._skip_rest(number, before - self.progress.left.total())

    def _skip_rest(self, number: int, done: int) -> None:
        kinds = [START, *map(self._kind, self.tasks[number])]
        self.progress.skip(kinds[done:])

    @staticmethod
    def _kind(task: Task) -> tuple[str, int]:
        return task.kind, task.load

    def _start_process(self, number: int) -> EngineProcess:
        plan = self.job.plans[number]
        args = replace(self.job.engine_args, speculative_config=plan.spec)
        log = self.job.logs / f"engine-{number}.log"
        return EngineProcess(args, plan.env or {}, log)

    def _run_engine(self, number: int) -> None:
        plan = self.job.plans[number]
        engine, self.next = self.next or self._start_process(number), None
        try:
            self.progress.begin(plan.drafter)
            with self.progress.doing(START, f"{plan.drafter}: {START}"):
                said = engine.ask("describe")
            if number + 1 < len(self.job.plans):
                self.next = self._start_process(number + 1)
            self.within = max(self.within, tolerance(said["dtype"]))
            beside: dict[int, list[Round]] = {}
            found = {s.name: Found(plan, s, said, beside=beside) for s in plan.settings}
            try:
                self._run_tasks(number, engine, found)
            except EngineError:
                # Differences that were found before it failed are errors all the same.
                drafting = filter(lambda each: each.is_drafting, found.values())
                self.found += [each for each in drafting if each.comparison.errors]
                raise
            self.found += found.values()
            if plan.is_beside:
                self.beside = engine, self.found[-1]
        finally:
            if self.beside is None or self.beside[0] is not engine:
                engine.stop()
        if plan.is_reference or plan.is_beside:
            # The target differs from itself by this: elsewhere it may be rounding too.
            own = self.found[-1].comparison.errors
            gaps = [difference.gap for difference in own]
            self.within = max([self.within, *(g for g in gaps if g < float("inf"))])

    def _run_tasks(
        self, number: int, engine: EngineProcess, found: dict[str, Found]
    ) -> None:
        for task in self.tasks[number]:
            own = found[task.setting.name]
            what = f"{own.name}: {task.kind}, {task.load} at a time"
            with self.progress.doing(self._kind(task), what):
                self._run_task(task, engine, own)

    def _run_task(self, task: Task, engine: EngineProcess, found: Found) -> None:
        is_reference = task.kind == CHECK and found.plan.is_reference
        requests, is_seeded = self._requests(task), task.is_seeded
        sampling = [self._sampling(n, r, is_seeded) for n, r in enumerate(requests)]
        if is_reference:
            sampling = [{**each, "logprobs": NUM_LOGPROBS} for each in sampling]
        prompts = [request.prompt for request in requests]
        asked = {"prompts": prompts, "sampling": sampling, "load": task.load}
        asked["told"] = task.setting.told
        if task.kind == MEASURE:
            result = self._measure(engine, found, task, {**asked, "staggered": True})
        else:
            result = engine.ask("run", **asked)
        if is_reference:
            known = zip(prompts, result.answers, sampling, strict=True)
            expected = [Expected(*each) for each in known]
            if is_seeded:
                self.seeded = expected
            else:
                self.greedy = self.greedy or expected
            return
        if found.plan.is_lossless:
            expected = self.seeded if is_seeded else self.greedy
            found.comparison.add(expected, result.answers, self.within)

    def _measure(
        self, engine: EngineProcess, found: Found, task: Task, asked: dict[str, Any]
    ) -> Round:
        """Runs a round, in turns with one without speculation if there is an engine for
        it. If all prompts are equally long, a token takes as long in any request, and
        half of them do there."""
        load = task.load
        if self.beside is not None and task.setting is found.plan.settings[0]:
            other, none = self.beside
            is_alike = len({*map(len, asked["prompts"])}) == 1
            half = -(-len(asked["prompts"]) // 2)
            few = slice(max(load, half) if is_alike else None)
            fewer = {name: asked[name][few] for name in ("prompts", "sampling")}
            turns = (engine, asked), (other, {**asked, **fewer, "told": None})
            result, without = take_turns(*turns)
            none.rounds.setdefault(load, []).append(without)
            found.beside.setdefault(load, []).append(without)
        else:
            result = engine.ask("run", **asked)
        found.rounds.setdefault(load, []).append(result)
        return result

    def _requests(self, task: Task) -> list[Request]:
        """Each prompt once to check; to measure, as many as a round has, repeated."""
        known = self.job.requests
        if task.kind == CHECK:
            return known
        return list(islice(cycle(known), self.job.loads[task.load]))

    def _sampling(
        self, number: int, request: Request, is_seeded: bool
    ) -> dict[str, Any]:
        seed = (self.job.engine_args.seed or 0) + number
        drawn = {**SEEDED, "seed": seed} if is_seeded else {"temperature": 0.0}
        most = request.max_tokens
        if is_seeded and self.job.seeded_len is not None:
            most = min(most, self.job.seeded_len)
        return {**drawn, "max_tokens": most, "ignore_eos": self.job.ignore_eos}
