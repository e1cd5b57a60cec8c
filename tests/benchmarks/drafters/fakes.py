# SPDX-License-Identifier: Apache-2.0
"""Fake engines with given speeds and answers, for tests of measurements and reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm.benchmarks.drafters import measure
from vllm.benchmarks.drafters.engine import Answer, Round
from vllm.benchmarks.drafters.plan import EnginePlan, Setting
from vllm.benchmarks.drafters.processes import EngineError
from vllm.benchmarks.drafters.prompts import Request

SPEC = {"model": "d"}
PARD = EnginePlan(
    "pard",
    SPEC,
    (
        Setting("auto", SPEC, None, 2),
        Setting("K=2", SPEC | {"num_speculative_tokens": 2}, 2, 2),
    ),
)
EAGLE = EnginePlan("eagle", {"model": "e"}, (Setting("auto", {"model": "e"}, None, 2),))


@dataclass
class FakeArgs:
    seed: int = 0
    speculative_config: dict[str, Any] | None = None


class FakeEngine:
    """Has `speeds` in tokens/s by (model, told), and `wrong` and `broken` models."""

    speeds: Mapping[tuple[str | None, int | None], float] = MappingProxyType({})
    wrong: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()
    at_the_end = 10.0  # speed of the second engine without speculation
    slowdown = 1.0  # factor by which the machine slows down with each answer
    num_answers = 0

    def __init__(self, engine_args: FakeArgs, env: dict[str, str], log: Path) -> None:
        self.model = (engine_args.speculative_config or {}).get("model")
        self.number = int(log.stem.rpartition("-")[2])

    def ask(self, command: str, **args: Any) -> Any:
        if self.model in self.broken:
            raise EngineError("out of memory")
        if command == "describe":
            return {"start_s": 1.0, "memory_bytes": 1 << 30, "dtype": "float32"}
        return self.answer(**args)

    def answer(self, prompts, sampling, load, told=None, staggered=False) -> Round:
        answers = []
        speed = self.speeds.get((self.model, told), 10.0)
        if self.number and self.model is None:
            speed = self.at_the_end
        speed /= self.slowdown**self.num_answers
        type(self).num_answers += 1
        for prompt, asked in zip(prompts, sampling, strict=True):
            tokens = [prompt[0]] * asked["max_tokens"]
            if self.model in self.wrong:
                tokens[-1] += 1
            logprobs = [{token: -0.1, 99: -5.0} for token in tokens]
            times = 0.0, load * len(tokens) / speed
            logprobs = logprobs if "logprobs" in asked else []
            answers.append(Answer(tokens, logprobs, 0.0, times))
        drafts = 10 if self.model else 0
        by_position = ([10, 5], [8, 4]) if drafts else ([], [])
        return Round(answers, load, drafts, 12, *by_position)

    def stop(self) -> None:
        pass


def one_after_the_other(*asked: tuple[FakeEngine, dict[str, Any]]) -> list[Round]:
    return [engine.ask("run", **args) for engine, args in asked]


def measured(
    monkeypatch,
    *plans: EnginePlan,
    in_turns: bool = False,
    base: type[FakeEngine] = FakeEngine,
    loads: Mapping[int, int] = MappingProxyType({1: 3, 4: 8}),
    seeded_len: int | None = None,
    prompts: tuple[list[int], ...] = ([0], [1], [2]),
    **engine: Any,
) -> measure.Measurement:
    """A finished measurement of fake engines."""
    fake = type("Fake", (base,), engine)
    monkeypatch.setattr(measure, "EngineProcess", fake)
    monkeypatch.setattr(measure, "take_turns", one_after_the_other)
    turns = {"is_beside": True, "repeats": 0} if in_turns else {}
    none = EnginePlan("no speculation", None, (Setting(),), **turns)
    requests = [Request(prompt, 9) for prompt in prompts]
    again = EnginePlan("no speculation", None, (Setting("again"),), is_seeded=False)
    plans, logs = [none, *plans, *[again] * (not in_turns)], Path("logs")
    more = 2, seeded_len, False, logs
    job = measure.Job(FakeArgs(), plans, requests, loads, *more)
    done = measure.Measurement(job)
    done.run()
    assert not done.progress.left.total()
    return done
