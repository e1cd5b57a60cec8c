# SPDX-License-Identifier: Apache-2.0
"""The table of tests that ran on a GPU."""

import json
from pathlib import Path

from tools.docs.gpu_tests import gpu_test_table


def write(
    folder: Path, base: str, files: dict[str, dict], failed: list[str], **more
) -> None:
    run = {
        "base": base,
        "device": "a GPU",
        "software": "Python 3",
        "date": "2026-01-01",
        "total": {"passed": 5, "skipped": 1},
        "files": files,
        "failed": failed,
        **more,
    }
    (folder / "gpu" / f"gpu-tests-{base}.json").write_text(json.dumps(run))


def test_bases_stand_side_by_side(tmp_path: Path):
    (tmp_path / "gpu").mkdir()
    assert gpu_test_table(tmp_path) == "No results yet."
    write(tmp_path, "1.0", {"a.py": {"passed": 2}}, [])
    write(
        tmp_path, "1.1", {"a.py": {"passed": 1, "failed": 1}, "b.py": {}}, ["a.py::x"]
    )
    table = gpu_test_table(tmp_path)
    assert "- 1.0 on a GPU, 2026-01-01, Python 3: 5 passed, 1 skipped." in table
    assert "| tests | 1.0 | 1.1 |" in table
    assert "| `a.py` | 2 passed | 1 passed, 1 failed |" in table
    assert "| `b.py` | – |" in table
    assert table.endswith("- over 1.1: `a.py::x`")


def test_what_went_wrong_is_said(tmp_path: Path):
    (tmp_path / "gpu").mkdir()
    why = {"a.py::x": "It was too short."}
    write(tmp_path, "1.1", {}, ["a.py::x", "a.py::y"], why=why, unfinished=["a.py::z"])
    _, failed = gpu_test_table(tmp_path).split("Failed:\n\n")
    assert failed.splitlines() == [
        "- over 1.1: `a.py::x`. It was too short.",
        "- over 1.1: `a.py::y`",
        "",
        "Begun and not ended:",
        "",
        "- over 1.1: `a.py::z`",
    ]


def test_commits_are_named(tmp_path: Path):
    (tmp_path / "gpu").mkdir()
    commits = {"a.py": ("0123456789abc", False), "b.py": ("0123456789abc", True)}
    sources = {
        file: {"commit": commit, "has_uncommitted": changed, "date": "2026-01-01"}
        for file, (commit, changed) in commits.items()
    }
    write(tmp_path, "1.1", {}, [], sources=sources)
    assert (
        "1 skipped, from `0123456789`, `0123456789` and changes not committed."
        in gpu_test_table(tmp_path)
    )
