# SPDX-License-Identifier: Apache-2.0
"""Results files: their keys, and how they are merged."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.results import EngineKey, PointKey
from benchmarks.spec_decode.shapes import SETS


@pytest.mark.parametrize("shapes", SETS)
@pytest.mark.parametrize(
    "setting", [{}, {"is_auto": True}, {"tree": 31}, {"is_adaptive": True}]
)
@pytest.mark.parametrize("context", [128, 16384])
def test_point_key_reads_what_it_writes(setting: dict, shapes: str, context: int):
    engine = EngineKey("ours", "peagle", 11, shapes=shapes, **setting)
    key = PointKey(engine, "by-position", 64, context)
    assert PointKey.parse(str(key)) == key


def test_keys_do_not_name_what_is_usual():
    engine = EngineKey("ours", "peagle", 7, tree=31)
    assert str(PointKey(engine, "equal", 8)) == "ours/peagle/K7tree31/equal/c8"


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
    monkeypatch.setattr(sys, "argv", ["serving.py", *given, "--seconds", "1"])
    command = files.command_line("serving")
    assert command == "python -m benchmarks.spec_decode.serving --seconds 1"
