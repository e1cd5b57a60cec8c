# SPDX-License-Identifier: Apache-2.0
"""Which engines run side by side, and how."""

import json
from pathlib import Path

import pytest

from benchmarks.spec_decode.flags import parse
from benchmarks.spec_decode.plan import (
    acceptance_rates,
    curve,
    plan_groups,
    recording,
)
from benchmarks.spec_decode.process import WorkerError, WorkerProcess, last_error
from benchmarks.spec_decode.results import IMPLEMENTATIONS, EngineKey
from benchmarks.spec_decode.rounds import mean_length
from benchmarks.spec_decode.shapes import (
    CONFIGS,
    MODES,
    SETS,
    modes_of,
    speculative_config,
    write_shapes,
)
from benchmarks.spec_decode.traces import TEXTS, Trace
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.drafter.checkpoint import read_checkpoint


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_every_engine_once_and_peers_together(at_once: int):
    groups = plan_groups(list(IMPLEMENTATIONS), list(MODES), [3, 7], at_once)
    keys = [key for group in groups for key in group]
    assert len(keys) == len(set(keys)) == 3 + 2 * (3 + 2 + 1 + 3 + 2)
    assert max(map(len, groups)) <= at_once
    assert EngineKey("base-v2", "pard", 7) not in keys
    assert EngineKey("base-v1", "pard2", 7) not in keys
    if at_once >= 3:
        for group in groups:
            for _, *drafter in group:
                peers = {key for key in keys if list(key[1:]) == drafter}
                assert peers <= set(group)


def test_one_engine_of_a_mode_chooses_its_draft_length():
    groups = plan_groups(
        ["ours", "base-v1"], ["none", "pard", "draft"], [7], 3, auto=11
    )
    chosen = [key for group in groups for key in group if key.is_auto]
    assert [str(key) for key in chosen] == ["ours/pard/K11auto", "ours/draft/K11auto"]


def test_engines_with_trees_and_with_adaptive_verification():
    def planned(mark: str, *args, **kwargs) -> list[EngineKey]:
        groups = plan_groups(*args, [7, 11], 3, **kwargs)
        return [key for group in groups for key in group if getattr(key, mark)]

    modes, sides = ["draft", "pard"], ["ours", "base-v2", "base-v1"]
    (tree,) = planned("tree", sides, modes, trees=[8, 15])
    assert str(tree) == "ours/pard/K11tree15"
    assert recording("recorded-t0.5", tree) == "pard-t0.5"
    assert recording("recorded-t0.5", EngineKey("ours", "pard2", 7)) == "pard-t0.5"
    assert recording("recorded-t0.5", EngineKey("ours", "none", 0)) is None
    assert recording("equal", tree) is None
    adaptive = planned("is_adaptive", sides, modes, adaptive=True)
    engines = ("ours/draft", "base-v2/draft", "ours/pard")
    assert {str(key) for key in adaptive} == {
        f"{engine}/K{k}adaptive" for engine in engines for k in (7, 11)
    }


@pytest.mark.parametrize("name", [f"{d}-{t}" for d in MODES for t in TEXTS])
def test_every_drafter_has_recordings(name: str):
    if not name.startswith(("none", "pard2")):
        assert Trace.load(name).header["rows"] > 1000


def test_options_of_trees_and_recordings(capsys):
    site = [f"--site=ours={Path(__file__).parent}", "--implementations=ours"]
    args = parse([*site, "--trace", "t0.5", "greedy", "--draft-tree", "15", "31"])
    assert args.acceptance == ["recorded-t0.5", "recorded-greedy"]
    assert args.context == [128] and args.draft_tree == [15, 31]
    with pytest.raises(SystemExit):
        parse([*site, "--draft-tree", "15"])
    assert "need --trace" in capsys.readouterr().err


def test_acceptance_of_every_label():
    def length(label: str, *key) -> float | None:
        rates = acceptance_rates(label, EngineKey(*key))
        return rates if rates is None else mean_length(rates)

    assert length("equal", "base-v1", "none", 0) == 1.0
    assert length("by-position", "base-v2", "eagle3", 7) is None
    assert length("equal", "ours", "eagle3", 7, True) is None
    assert length("by-position", "ours", "eagle3", 11, True) == pytest.approx(4.0)
    for k, wanted in {3: 2.5, 5: 3.0, 7: 3.5, 11: 4.0}.items():
        for label in ("equal", "by-position"):
            assert length(label, "ours", "draft", k) == pytest.approx(wanted)
    assert len(curve(15)) == 15


@pytest.mark.parametrize("name", SETS)
def test_shapes_are_what_they_are_called(name: str, tmp_path: Path):
    models = write_shapes(name, tmp_path)
    assert set(modes_of(name)) == {"none", *models} - {"target"}
    for mode in modes_of(name)[1:]:
        config = json.loads((models[mode] / "config.json").read_text())
        found = read_checkpoint(config, models[mode])
        spec = speculative_config(mode, models, 7, curve(7))
        assert found.is_parallel == spec.get("parallel_drafting", False)


@pytest.mark.parametrize("name", [n for n in CONFIGS if "pard2" in CONFIGS[n]])
def test_pard2_is_fed_states_of_its_target(name: str, tmp_path: Path):
    models = write_shapes(name, tmp_path)
    spec = SpeculativeConfig(
        model=str(models["pard2"]),
        num_speculative_tokens=7,
        target_model_config=ModelConfig(
            str(models["target"]), skip_tokenizer_init=True
        ),
        target_parallel_config=ParallelConfig(),
    )
    depth = CONFIGS[name]["target"]["num_hidden_layers"]
    fed = spec.drafter.target_features
    assert fed.layers == (depth, depth - 7, depth - 15, depth - 23)


def test_modes_that_shapes_lack(capsys):
    site = f"--site=ours={Path(__file__).parent}"
    more = ["--implementations=ours", "--shapes=qwen3-8b"]
    assert parse([site, *more]).modes == ["none", "pard2"]
    with pytest.raises(SystemExit):
        parse([site, *more, "--modes", "draft", "pard2"])
    assert "the shapes qwen3-8b have no draft" in capsys.readouterr().err


def test_unknown_shapes(tmp_path: Path):
    with pytest.raises(ValueError, match=r"llama-3\.1-8b"):
        write_shapes("gpt", tmp_path)


def test_last_error():
    log = "INFO x\nValueError: too large\n  at y\nRuntimeError: engine died\nbye\n"
    assert last_error(log) == "RuntimeError: engine died"
    assert last_error("only this\n") == "only this"


def fake_python(tmp_path: Path, body: str) -> list[str]:
    """An interpreter that runs `body` whatever it is asked to run."""
    script = tmp_path / "fake.sh"
    script.write_text(f"#!/bin/sh\nread job\n{body}\n")
    script.chmod(0o755)
    return [str(script)]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ('echo \'{"error": "no memory"}\'', "no memory"),
        ("echo 'OSError: gone' >&2; exit 1", "OSError: gone"),
        ("sleep 60", "no answer within 1 s"),
    ],
)
def test_a_worker_that_fails(body: str, match: str, tmp_path: Path):
    worker = WorkerProcess(fake_python(tmp_path, body), {}, {}, tmp_path / "log")
    try:
        with pytest.raises(WorkerError, match=match):
            worker.answer(1.0)
    finally:
        worker.stop()
    assert worker.process.poll() is not None


def test_a_worker_answers_each_command(tmp_path: Path):
    python = fake_python(tmp_path, 'while read line; do echo "$line"; done')
    worker = WorkerProcess(python, {}, {}, tmp_path / "log")
    try:
        assert worker.ask(5.0, command="x", a=1) == {"command": "x", "a": 1}
        assert worker.ask(5.0, command="y") == {"command": "y"}
    finally:
        worker.stop()
