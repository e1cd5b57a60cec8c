# SPDX-License-Identifier: Apache-2.0
"""Merging results files, and the numbers that follow from them."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import BASE, Comparison, ratio, step_ratio
from benchmarks.spec_decode.results import EngineKey, PointKey
from benchmarks.spec_decode.shapes import PARALLEL, SETS


def point(speeds: list[float], step_s: float = 0.01, **more) -> dict:
    repeats = [{"tokens_per_s": s, "step_s": step_s, "draft_s": 0.002} for s in speeds]
    return {"run": "r", "acceptance_length": 3.5, "repeats": repeats, **more}


@pytest.fixture
def results() -> files.Results:
    return {
        "runs": {"r": {"device": {"copy_bytes_per_s": 4e12}}},
        "engines": {
            "ours/draft/K7": {"target_bytes": 16_000_000_000, "draft_bytes": 10**9},
            "ours/pard/K7": {"target_bytes": 16_000_000_000, "draft_bytes": 10**9},
        },
        "measurements": {
            "ours/draft/K7/equal/c8": point([300.0, 200.0, 400.0]),
            "base-v2/draft/K7/equal/c8": point([100.0], step_s=0.02),
            "base-v1/draft/K7/equal/c8": point([150.0], step_s=0.015),
            "ours/draft/K3/equal/c8": point([310.0]),
            "ours/pard/K7/equal/c8": point([500.0]),
        },
    }


@pytest.mark.parametrize("shapes", SETS)
@pytest.mark.parametrize("is_auto", [False, True])
def test_point_key_reads_what_it_writes(is_auto: bool, shapes: str):
    engine = EngineKey("ours", "peagle", 11, is_auto, shapes)
    key = PointKey(engine, "by-position", 64)
    assert PointKey.parse(str(key)) == key


def test_other_shapes_stand_apart(results: files.Results):
    results["measurements"]["ours/pard@qwen3-8b/K7/equal/c8"] = point([900.0])
    for shapes, speed in {"llama-3.1-8b": 500.0, "qwen3-8b": 900.0}.items():
        compared = Comparison(results, shapes)
        assert compared.best_k("ours", "pard", "equal", 8).tokens_per_s.median == speed
        assert compared.values("pard", "equal") == ([7], [8])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
    ],
)
def test_slug(name: str, expected: str):
    assert files.slug(name) == expected


def test_saving_merges_by_key(tmp_path: Path):
    path = tmp_path / "gpu" / "engine.json"
    old, new = {"run": "1"}, {"run": "2"}
    files.save(
        path, {"measurements": {"a": old, "b": old}, "failures": {"b": old, "c": old}}
    )
    files.save(path, {"measurements": {"b": new}, "engines": {"c": new}})
    found = json.loads(path.read_text())
    assert found["measurements"] == {"a": old, "b": new}
    assert found["failures"] == {}
    assert [file.name for file in path.parent.iterdir()] == ["engine.json"]


def test_a_run_is_kept_as_long_as_something_of_it(tmp_path: Path):
    old = {"runs": {"1": {}, "2": {}}, "measurements": {"a": {"run": "1"}}}
    new = {"runs": {"3": {}}, "measurements": {"b": {"run": "3"}}}
    assert files.merge(old, new)["runs"].keys() == {"1", "3"}


def test_a_new_failure_stays(tmp_path: Path):
    merged = files.merge({}, {"engines": {"c": {}}, "failures": {"c": {}}})
    assert merged["failures"] == {"c": {}}


def test_spread():
    assert files.spread([300.0, None, 200.0, 400.0]) == (300.0, pytest.approx(1 / 3), 3)
    assert files.spread([None]) is None


def test_ratio_is_to_the_bases_faster_runner(results: files.Results):
    compared = Comparison(results)
    ours = compared.at("ours", "draft", 7, "equal", 8)
    base = compared.at(BASE, "draft", 7, "equal", 8)
    assert base.key.engine.implementation == "base-v1"
    assert ratio(ours, base) == pytest.approx(2.0)
    assert step_ratio(ours, base) == pytest.approx(1.5)
    assert ratio(ours, compared.at(BASE, "draft", 7, "equal", 1)) is None


def test_best_k(results: files.Results):
    best = Comparison(results).best_k("ours", "draft", "equal", 8)
    assert best.key.engine.num_tokens == 3


@pytest.mark.parametrize(("mode", "passes"), [("draft", 7), ("pard", 1)])
def test_share_of_the_memory_floor(mode: str, passes: int, results: files.Results):
    row = Comparison(results).at("ours", mode, 7, "equal", 8)
    floor = (16e9 + passes * 1e9) / 4e12
    assert row.floor_share == pytest.approx(floor / 0.01)
    assert row.target_s == pytest.approx(0.008)


def test_no_passes_without_speculation():
    assert files.num_passes("none", 0, PARALLEL) == 0


@pytest.mark.parametrize(
    "sites",
    [
        ["--site", "ours=/a/place", "--site", "base=/a/nother"],
        ["--site=ours=/a/place"],
    ],
)
def test_command_of_a_run_names_no_sites(sites: list[str], monkeypatch):
    words = ["engine.py", *sites, "--modes", "pard", "--note", "two words"]
    monkeypatch.setattr(sys, "argv", words)
    assert files.command_line("engine") == (
        "python -m benchmarks.spec_decode.engine $SITES --modes pard --note 'two words'"
    )


def test_recorded_commands_name_no_sites():
    for path in files.RESULTS.glob("*/*.json"):
        for run in files.load(path).get("runs", {}).values():
            assert "--site" not in run.get("command", ""), path


@pytest.mark.parametrize("flag", files.FILE_FLAGS)
@pytest.mark.parametrize("form", ["{}\n/else/where", "{}=/else"])
def test_command_does_not_say_where_files_are(monkeypatch, flag: str, form: str):
    given = form.format(flag).split("\n")
    monkeypatch.setattr(sys, "argv", ["soak.py", *given, "--seed", "1"])
    command = files.command_line("soak")
    assert command == "python -m benchmarks.spec_decode.soak --seed 1"
