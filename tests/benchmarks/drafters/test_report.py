# SPDX-License-Identifier: Apache-2.0
"""The report on measurements: table, plots, verdict, and the best command."""

import json
from dataclasses import replace

import pytest

from vllm.benchmarks.drafters.plan import EnginePlan, Setting
from vllm.benchmarks.drafters.processes import EngineError
from vllm.benchmarks.drafters.report import Report, draw

from .fakes import EAGLE, PARD, FakeEngine, measured


def report(monkeypatch, *plans, **engine) -> Report:
    done = measured(monkeypatch, *plans, **engine)
    return Report(done, "my target", ["-tp", "2"])


def test_table(monkeypatch, tmp_path):
    speeds = {("d", None): 25.0, ("d", 2): 20.0}
    found = report(monkeypatch, PARD, speeds=speeds)
    none, auto, fixed = list(found.rows())[:3]
    assert none["acceptance_length"] is None and none["ratio"] == 1
    assert auto["acceptance_length"] == pytest.approx(2.2)
    assert auto["drafted_by_position"] == [1.0, 0.5]
    assert auto["acceptance_by_position"] == [0.8, 0.8]
    assert (auto["ratio"], fixed["ratio"]) == (pytest.approx(2.5), pytest.approx(2.0))
    assert auto["tpot_s"] == pytest.approx(9 / 25 / 8)
    assert len(found.table().splitlines()) == 2 + 8
    assert "| pard           | auto   | 2.20 " in found.table()
    assert "  pard auto             " + "█" * 40 + " 25 (2.50×)\n" in found.plot()
    assert found.is_lossless and "Lossless" in found.verdict()
    assert "not compared" not in found.verdict()
    assert json.loads(json.dumps(found.as_json()))["rows"][1] == auto
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({("d", None): 19.9, ("d", 2): 20.0}, "pard auto"),  # equally fast
        ({("d", None): 15.0, ("d", 2): 20.0}, "pard K=2"),
        ({("d", None): 9.0, ("d", 2): 8.0}, "no speculation"),
    ],
)
def test_best(monkeypatch, speeds, best):
    found = report(monkeypatch, PARD, speeds=speeds)
    assert found.best().name == best
    spec = found.best().setting.spec
    more = f" --speculative-config '{json.dumps(spec)}'" if spec else ""
    assert found.advice().splitlines()[1] == f"vllm serve 'my target' -tp 2{more}"


@pytest.mark.parametrize(("end", "ratio"), [(9.9, 2.0), (16.0, 1.25), (5.0, 2.0)])
def test_unsteady_machine(monkeypatch, end, ratio):
    """The faster run without speculation is the base; differences are reported."""
    speeds = {("d", None): 20.0}
    found = report(monkeypatch, PARD, speeds=speeds, at_the_end=end)
    assert [r["ratio"] for r in found.rows()][1] == pytest.approx(ratio)
    assert ("Unsteady" in found.advice()) == (end != 9.9)


@pytest.mark.parametrize("in_turns", [True, False])
def test_slowing_machine(monkeypatch, in_turns):
    """With a drafter that doubles the speed; in turns, both are one answer apart."""
    both = {"speeds": {("d", None): 20.0, ("d", 2): 20.0}, "slowdown": 1.1}
    other = replace(PARD, drafter="another")
    found = report(monkeypatch, PARD, other, in_turns=in_turns, **both)
    drafted = [f for f in found.found if f.is_drafting]
    ratios = [found.ratio(f, n) for f in drafted for n in found.loads]
    assert all(1.75 < r < 2.25 for r in ratios) == in_turns
    assert "Unsteady" in found.advice()
    assert ("compare ratios" in found.advice()) == in_turns
    assert ("run it again alone" in found.advice()) != in_turns


def test_reference_engine_is_not_reported(monkeypatch):
    """It is in no table, and no speed is compared with its own."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    on_v2 = EnginePlan("on V2", None, (Setting(),), env=env, repeats=0)
    other = replace(PARD, drafter="another")
    found = report(monkeypatch, on_v2, other, speeds={("d", None): 20.0}, in_turns=True)
    assert "on V2" not in found.table() + found.plot()
    assert {round(row["ratio"], 9) for row in found.rows()} == {1.0, 2.0}


def test_lossy_drafter(monkeypatch):
    """Differences are shown with context; it is not the best, however fast."""
    speeds = {("d", None): 20.0, ("d", 2): 15.0, ("e", None): 90.0}
    found = report(monkeypatch, PARD, EAGLE, speeds=speeds, wrong={"e"})
    assert not found.is_lossless
    assert found.best().name == "pard auto"
    shown = "prompt 0, token 8: after [0, 0, 0, 0, 0, 0, 0, 0] no speculation has [0]"
    assert "eagle auto: 0 of 25 the same, 25 DIFFER" in found.verdict()
    assert shown in found.verdict() and "NOT LOSSLESS" in found.verdict()


def test_no_verdict_without_comparison(monkeypatch):
    """Synthetic acceptance changes output, so it is not compared."""
    found = report(monkeypatch, replace(PARD, is_lossless=False), wrong={"d"})
    assert "Nothing is known" in found.verdict() and found.is_lossless
    assert "Lossless" not in found.verdict()


@pytest.mark.parametrize(("gap", "is_known"), [(0.5, True), (1.5, False)])
def test_nondeterministic_target(monkeypatch, gap, is_known):
    """Losslessness is unknown unless a drafter differs by more than the target does."""
    done = measured(monkeypatch, PARD)
    done.within = gap
    found = Report(done, "my target", [])
    assert ("Lossless" in found.verdict()) == is_known
    told = "Nothing is known of losslessness: no speculation differs from itself by 1.5"
    assert (told in found.verdict()) != is_known
    wrong = measured(monkeypatch, EAGLE, wrong={"e"})
    wrong.within = gap
    assert "NOT LOSSLESS" in Report(wrong, "my target", []).verdict()


def test_differences_count_if_engine_fails_later(monkeypatch):
    def ask(engine: FakeEngine, command: str, **args):
        if engine.model == "e" and args.get("load") == 1:
            raise EngineError("out of memory")
        return FakeEngine.ask(engine, command, **args)

    found = report(monkeypatch, PARD, EAGLE, wrong={"e"}, ask=ask)
    assert "out of memory" in found.as_json()["failed"]["eagle auto"]
    assert "NOT LOSSLESS" in found.verdict() and not found.is_lossless
    assert found.best().name != "eagle auto"
    assert found.table() and found.plot()


def test_failing_engine(monkeypatch):
    """Other engines are still measured; a failure without speculation ends the run."""
    found = report(monkeypatch, PARD, EAGLE, broken={"d"})
    names = [f.name for f in found.found]
    assert names == ["no speculation", "eagle auto", "no speculation again"]
    assert "out of memory" in found.as_json()["failed"]["pard auto/K=2"]
    assert found.advice().startswith("Best: ")
    alone = report(monkeypatch, PARD, broken={"d"})
    assert alone.advice().startswith("Nothing is known of any drafter")
    assert "best" not in alone.as_json()
    with pytest.raises(EngineError, match="memory"):
        measured(monkeypatch, PARD, broken={None})


def test_nothing_is_known_without_turns(monkeypatch):
    """No speculation is measured only beside drafters."""
    found = report(monkeypatch, PARD, broken={"d"}, in_turns=True)
    assert not list(found.rows()) and found.table() and found.plot()
    assert found.advice().startswith("Nothing is known of any drafter")
