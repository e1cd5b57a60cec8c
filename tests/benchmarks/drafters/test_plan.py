# SPDX-License-Identifier: Apache-2.0
"""Which engines `vllm bench drafters` starts, and which arguments it refuses."""

import logging
import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.benchmarks.drafters import command, processes
from vllm.benchmarks.drafters.plan import (
    CHECK,
    MEASURE,
    name_drafters,
    plan_engines,
    plan_tasks,
)
from vllm.config.drafter.drafter import DrafterConfig
from vllm.config.drafter.length import AutoSchedule, candidate_lengths

DEPTH = 8


def resolve(spec: dict[str, Any] | None) -> SimpleNamespace:
    """A fake engine config: "auto" unless the spec says how much to draft."""
    if spec is None:
        return SimpleNamespace(use_v2_model_runner=True)
    length = spec.get("num_speculative_tokens")
    schedule = AutoSchedule(candidate_lengths(DEPTH, 63))
    drafter = DrafterConfig("draft_model", length or DEPTH, is_unified=True)
    is_auto = not length and spec.get("method") != "fixed"
    resolved = SimpleNamespace(
        drafter=drafter,
        num_speculative_tokens=length or DEPTH,
        num_speculative_tokens_per_batch_size=schedule if is_auto else None,
        rejection_sample_method=spec.get("rejection_sample_method", "standard"),
    )
    return SimpleNamespace(speculative_config=resolved)


def flags(**given: Any) -> Namespace:
    usual = {"num_speculative_tokens": None, "draft_tree": None, "quick": False}
    usual |= {"auto_alone": False, "in_turns": False}
    return Namespace(**usual | given)


@pytest.mark.parametrize(
    ("spec", "given", "engines"),
    [
        ({}, {}, ["auto K=1 K=3 K=5 K=8 tree of 15 tree of 31 tree of 63"]),
        ({}, {"quick": True}, ["auto K=8 tree of 31"]),
        ({}, {"num_speculative_tokens": [2, 6], "draft_tree": []},
         ["auto K=2", "K=6"]),
        ({}, {"num_speculative_tokens": [15], "draft_tree": [20]},
         ["auto", "K=15", "tree of 20"]),
        ({"num_speculative_tokens": 5}, {"num_speculative_tokens": [2]},
         ["num_speculative_tokens=5"]),
        ({"method": "fixed"}, {}, ["K=8"]),
    ],
)  # fmt: skip
def test_engines(spec, given, engines):
    spec = {"model": "a/b"} | spec
    none, *plans = plan_engines([spec], flags(**given), resolve)
    assert none.spec is None
    if not given.get("quick"):
        again = plans.pop()
        assert again.spec is None
    assert [" ".join(s.name for s in p.settings) for p in plans] == engines
    for plan in plans:
        assert plan.drafter == "b" and plan.is_lossless and plan.is_seeded
        for setting in plan.settings:
            # The spec says how much to draft, unless the engine chooses.
            length = setting.spec.get("num_speculative_tokens")
            assert length == (None if setting.name == "auto" else setting.depth)
            assert (setting.told is None) == (setting is plan.settings[0])


def test_in_turns_measures_no_speculation_beside_drafters():
    none, plan = plan_engines([{"model": "a"}], flags(in_turns=True), resolve)
    assert none.is_beside and none.spec is None
    assert not plan.is_beside and plan.spec
    alone = [(task.kind, task.load) for task in plan_tasks(none, [1, 8], 3)]
    assert alone == [(CHECK, 8)] * 2


def test_all_engines_are_resolved_first():
    seen = []

    def watched(spec: dict[str, Any]) -> SimpleNamespace:
        seen.append(spec)
        return resolve(spec)

    plans = plan_engines([{"model": "a"}], flags(draft_tree=[20]), watched)
    assert all(plan.spec in seen for plan in plans if plan.spec)


def test_reference_without_speculation_on_other_runner():
    """If vLLM's default runner is not the drafters', theirs gives the reference."""

    def without_v2(spec: dict[str, Any] | None) -> SimpleNamespace:
        return resolve(spec) if spec else SimpleNamespace(use_v2_model_runner=False)

    on_v2, none, *_ = plan_engines([{"model": "a"}], flags(), without_v2)
    assert none.spec is on_v2.spec is None
    assert not none.env and on_v2.env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert on_v2.is_reference and not none.is_reference
    # vLLM's default takes turns with drafters; the other gives reference output only.
    on_v2, none, _ = plan_engines([{"model": "a"}], flags(in_turns=True), without_v2)
    assert [task.kind for task in plan_tasks(on_v2, [1, 8], 3)] == [CHECK] * 2
    assert none.is_beside and not on_v2.is_beside


def test_synthetic_acceptance_is_not_compared():
    spec = {"model": "a", "rejection_sample_method": "synthetic"}
    assert not plan_engines([spec], flags(), resolve)[1].is_lossless


def test_tasks():
    none, plan = plan_engines([{"model": "a"}], flags(quick=True), resolve)
    kinds = [task.kind for task in plan_tasks(none, [1], 2)]
    assert kinds == [CHECK] * 2 + [MEASURE] * 2
    *_, again = plan_engines([{"model": "a"}], flags(), resolve)
    assert {task.kind for task in plan_tasks(again, [1], 2)} == {MEASURE}
    tasks = plan_tasks(plan, [1, 32], 2)
    measured = [(t.load, t.setting.name) for t in tasks if t.kind == MEASURE]
    # In turns; a tree has too many rows for 32 requests.
    small = [(1, name) for name in ("auto", "K=8", "tree of 31")]
    assert all(task.kind == CHECK for task in tasks[len(measured) :])
    assert measured == [(32, name) for _, name in small[:2]] * 2 + small * 2


@pytest.mark.parametrize(
    ("spec", "given", "names"),
    [
        ({}, None, ["auto"]),
        ({}, [2], ["auto", "K=2"]),
        ({"method": "fixed"}, None, ["K=8"]),  # it has no "auto"
    ],
)
def test_auto_alone_plans_only_requested_lengths(spec, given, names):
    given = flags(auto_alone=True, draft_tree=[], num_speculative_tokens=given)
    _, plan, _ = plan_engines([{"model": "a"} | spec], given, resolve)
    assert [setting.name for setting in plan.settings] == names


def test_drafters():
    specs = [{"model": "a/b"}, {"method": "ngram"}, {"model": "c/b"}]
    assert name_drafters(specs) == ["b (1)", "ngram", "b (2)"]
    one = [{"model": "b"}, {"model": "b", "draft_tree": 15}]
    assert name_drafters(one) == ["b", "b"]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("--model m", "needs --drafter"),
        ("--drafter d", "needs --model"),
        ("--output-len 0", "--output-len must be at least 1"),
        ("--num-speculative-tokens 0 3", "--num-speculative-tokens must be at least 1"),
        ("--concurrency 0 8", "--concurrency must be at least 1"),
        ("--concurrency 8 --max-num-seqs 4", "as high a --max-num-seqs"),
        ("--data-parallel-size 2", "--data-parallel-size is not supported"),
        ("--model m --drafter 3", "a JSON object"),
        ("--spec-model d", "--drafter"),
        ("--json no/such/folder.json", "no such folder"),
        ("--model {models}/target --drafter {{no", "not valid JSON"),
        ("--model {models}/target --drafter ./no/folder", "no/folder"),
        ("--output-len 9999", "lower --output-len"),
        (
            "--model {models}/targit --drafter {models}/pard",
            'such as "{models}/target"',
        ),
        ("--model m --drafter d --dataset-path p.jsonl", "needs --dataset-name"),
    ],
)
def test_bad_input(models, monkeypatch, capsys, given, error):
    """One error line, and no engine starts."""
    monkeypatch.setattr(command, "run", lambda *job: pytest.fail("an engine starts"))
    monkeypatch.setattr(processes, "import_ahead", lambda: None)
    words = given.format(models=models).split()
    monkeypatch.setattr(sys, "argv", ["vllm", "bench", "drafters", *words])
    with pytest.raises(SystemExit) as ended:
        command.main(command.parse(words))
    assert ended.value.code == 2
    (line,) = (s for s in capsys.readouterr().err.splitlines() if "error: " in s)
    assert error.format(models=models) in line


def test_missing_package_is_one_line(models, monkeypatch, capsys):
    def prepare(*args):
        raise ImportError("Please install vllm[bench]")

    monkeypatch.setattr(command, "prepare", prepare)
    test_bad_input(models, monkeypatch, capsys, "--quick", "Please install vllm[bench]")


def test_target_warnings_are_not_shown():
    """Only a drafter's warnings are shown, each once."""
    log, shown = logging.Logger("test"), []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    log.addHandler(handler)
    with command.NewWarnings(log) as warnings:
        warnings.is_silent = True
        log.warning("Enforce eager set")
        warnings.is_silent = False
        for _ in range(2):
            log.warning("Enforce eager set")
            log.info("Resolved architecture")
            log.warning("The target drafts for itself")
    assert shown == ["The target drafts for itself"]
    log.info("Loading weights")  # by an engine that was forked
    assert shown[1:] == ["Loading weights"]


def test_engine_flags():
    words = "--model m -tp 2 --drafter a b --quick --dtype half"
    assert command.engine_flags(words.split()) == ["-tp", "2", "--dtype", "half"]


@pytest.mark.parametrize(
    "given, sizes",
    [
        ({}, {1: 32, 8: 32, 32: 64}),
        ({"quick": True}, {1: 4, 8: 16, 32: 64}),
        ({"quick": True, "in_turns": True}, {1: 3, 8: 8, 32: 32}),
    ],
)
def test_round_sizes(given: dict[str, bool], sizes: dict[int, int]):
    args = flags(concurrency=[1, 8, 32], **given)
    assert command.round_sizes(args, 32) == sizes
