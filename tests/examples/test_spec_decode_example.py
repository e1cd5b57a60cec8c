# SPDX-License-Identifier: Apache-2.0
"""The speculative decoding example: whole runs, and its exit status."""

import importlib
import json
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "offline_inference"
DRAFTERS = ("draft model", "PARD", "PARD, tree", "PARD-2", "EAGLE-3", "P-EAGLE")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("spec_decode")


@pytest.mark.slow
def test_bundled_models(engine_env, models, tmp_path):
    """Like a run without arguments, with fewer and shorter outputs."""
    report = tmp_path / "report.json"
    command = [sys.executable, str(FOLDER / "spec_decode.py"), f"--bundle={models}"]
    command += [f"--json={report}", "--num-prompts=2", "--output-len=16"]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    said, rows = done.stdout, json.loads(report.read_text())
    plain, *drafted = rows
    assert tuple(row["name"] for row in drafted) == DRAFTERS
    for row in drafted:
        assert row["identical"] and f"\n{row['name']} " in said
        by_position = row["acceptance_by_position"]
        assert len(by_position) >= 7
        assert all(0 <= share <= 1 for share in by_position)
        # The last drafts of an output are fewer, and shares are of those made.
        assert 1 < row["acceptance_length"] < 1 + sum(by_position) + 1e-6
    assert plain["acceptance_length"] is None


@pytest.mark.parametrize(
    ("drafted", "temp", "status", "identical"),
    [
        ([[1, 2], [3, 4]], "0", 0, True),
        ([[1, 2], [3, 5]], "0", 1, False),
        ([[1, 2], [3]], "0", 1, False),
        ([[1, 2], [3, 5]], "0.7", 0, None),
    ],
)
def test_exit_status(
    example, models, monkeypatch, tmp_path, drafted, temp, status, identical
):
    def result(job: dict[str, Any]) -> dict[str, Any]:
        is_plain = job["engine"]["speculative_config"] is None
        tokens = [[1, 2], [3, 4]] if is_plain else drafted
        return {"device": "a", "seconds": 2.0, "counters": {}, "token_ids": tokens}

    monkeypatch.setattr(example, "run_engine", result)
    monkeypatch.setattr(example, "read_prompts", lambda args: [[1], [2]])
    report = tmp_path / "report.json"
    flags = ["--bundle", str(models), "--json", str(report), "--temp", temp]
    assert example.main([*flags, "--speculative-config", '{"model": "b"}']) == status
    rows = json.loads(report.read_text())
    assert [row["identical"] for row in rows] == [None, identical]


def test_row_name_has_tree_size(example):
    parser = example.make_parser()
    spec = '{"model": "a/pard", "draft_tree": 15}'
    plan = example.plan_of(parser.parse_args(["--speculative-config", spec]), parser)
    assert list(plan) == [example.PLAIN, "pard, tree of 15"]
