# SPDX-License-Identifier: Apache-2.0
"""The order in which engines are started, asked and stopped."""

from typing import Any, ClassVar

import pytest

from vllm.benchmarks.drafters import measure, processes
from vllm.benchmarks.drafters.plan import EnginePlan
from vllm.benchmarks.drafters.processes import EngineError, resolve_ahead

from .fakes import EAGLE, PARD, FakeEngine, measured


class Watched(FakeEngine):
    """Records by number what happens to each process."""

    events: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events.append(("process", self.number))

    def ask(self, command: str, **args: Any) -> Any:
        if (command, self.number) not in self.events:
            self.events.append((command, self.number))
        return super().ask(command, **args)

    def stop(self) -> None:
        self.events.append(("stop", self.number))


def run(monkeypatch, *plans: EnginePlan, broken=()) -> list[tuple[str, int]]:
    events: list[tuple[str, int]] = []
    monkeypatch.setattr(Watched, "events", events)
    measured(monkeypatch, *plans, base=Watched, broken=frozenset(broken))
    return events


def test_the_next_process_is_started_while_an_engine_is_measured(monkeypatch):
    """Its engine starts once the one before has given the device back."""
    assert run(monkeypatch, PARD) == [
        *(("process", 0), ("describe", 0), ("process", 1), ("run", 0), ("stop", 0)),
        *(("describe", 1), ("process", 2), ("run", 1), ("stop", 1)),
        *(("describe", 2), ("run", 2), ("stop", 2)),
    ]


@pytest.mark.parametrize(
    "prompts, halves",
    [(([0], [1]), {1: 2, 2: 4, 4: 4}), (([0], [1, 2]), {1: 4, 2: 8, 4: 4})],
)
def test_turns_without_speculation_are_half_as_long(monkeypatch, prompts, halves):
    """If all requests take equally long, and with as many at a time."""
    loads = {1: 4, 2: 8, 4: 4}
    shape = {"in_turns": True, "loads": loads, "prompts": prompts}
    found = measured(monkeypatch, PARD, **shape).found[1]
    for load, rounds in found.beside.items():
        assert [len(each.answers) for each in rounds] == 2 * [halves[load]]
        assert len(found.rounds[load][0].answers) == loads[load]


def test_seeded_outputs_may_be_shorter(monkeypatch):
    asked: set[tuple[int, bool]] = set()

    class Asked(FakeEngine):
        def answer(self, prompts, sampling, load, **more):
            asked.update((s["max_tokens"], "seed" in s) for s in sampling)
            return super().answer(prompts, sampling, load, **more)

    measured(monkeypatch, PARD, base=Asked, seeded_len=5)
    assert asked == {(9, False), (5, True)}


def test_only_measured_rounds_are_staggered(monkeypatch):
    asked: list[bool] = []

    class Asked(FakeEngine):
        def answer(self, *given, staggered=False, **more):
            asked.append(staggered)
            return super().answer(*given, **more)

    measured(monkeypatch, PARD, base=Asked, loads={4: 8})
    # Of no speculation two checks, then of each setting a check after its rounds.
    assert asked.count(False) == 2 + 2 and asked.count(True) == len(asked) - 4


def test_a_failed_engine_does_not_keep_the_next_from_starting(monkeypatch):
    events = run(monkeypatch, PARD, EAGLE, broken=["d"])
    assert events.count(("process", 2)) == 1 and ("run", 2) in events


def test_no_process_is_left_behind_without_a_base(monkeypatch):
    """Nothing can be measured if the engine without speculation fails."""
    monkeypatch.setattr(measure.Measurement, "_run_tasks", failing)
    with pytest.raises(EngineError):
        run(monkeypatch, PARD)
    events = Watched.events
    started = {number for what, number in events if what == "process"}
    assert started == {number for what, number in events if what == "stop"} == {0, 1}


def failing(*args: Any) -> None:
    raise EngineError("out of memory")


def test_configs_are_resolved_ahead_and_errors_left_to_the_start():
    resolved = []

    class Args:
        def create_engine_config(self, context: Any) -> None:
            resolved.append(context)
            raise ValueError("no such model")

    resolve_ahead(Args())
    assert resolved == [processes.UsageContext.LLM_CLASS]
