# SPDX-License-Identifier: Apache-2.0
"""Results files: their keys, how they are merged, and what is recorded of a run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.results import EngineKey, PointKey, Run


def test_keys():
    engine = EngineKey("ours", "peagle", 11, tree=31)
    key = PointKey(engine, "equal", 64)
    assert str(key) == "ours/peagle/K11tree31/equal/c64"
    engine = EngineKey("ours", "peagle", 11, is_auto=True, shapes="tiny")
    key = PointKey(engine, "recorded-t0.5", 8, 16384)
    assert str(key) == "ours/peagle@tiny/K11auto/recorded-t0.5/c8@16384"
    parts = ["ours", "peagle", "tiny", "K11auto", "recorded-t0.5", "8", "16384"]
    assert [*files.KEY.fullmatch(str(key)).groups()] == parts


def test_saving_merges_by_key(tmp_path: Path):
    path = tmp_path / "gpu" / "engine.json"
    old, new = {"run": "1"}, {"run": "3"}
    runs = {"1": {}, "2": {}}  # run 2 has no measurements
    files.save(path, {"runs": runs, "measurements": {"a": old, "b": old}})
    files.save(path, {"runs": {"3": {}}, "measurements": {"b": new}})
    found = json.loads(path.read_text())
    assert found["measurements"] == {"a": old, "b": new}
    assert found["runs"] == {"1": {}, "3": {}}
    assert [file.name for file in path.parent.iterdir()] == ["engine.json"]


@pytest.mark.parametrize(
    "places",
    [["--site", "ours=/a/place", "--output", "/else"], ["--site=a", "--output=/else"]],
)
def test_run_records_command_without_paths(places, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(files, "RESULTS", tmp_path)
    words = ["engine.py", *places, "--modes", "pard", "--engine-args", "{two words}"]
    monkeypatch.setattr(sys, "argv", words)
    device = {"name": "NVIDIA H100 80GB HBM3", "vllm": "0.33.0"}
    run = Run("engine", device)
    run.record("measurements", "a", {"x": 1})
    found = files.load(tmp_path / "nvidia-h100-80gb-hbm3" / "engine.json")
    assert found["measurements"] == {"a": {"x": 1, "run": run.name}}
    command = "python -m benchmarks.spec_decode.engine $SITES --modes pard "
    command += "--engine-args '{two words}'"
    assert found["runs"] == {run.name: {"command": command, "device": device}}
    assert run.name.startswith("20") and not run.is_over()
