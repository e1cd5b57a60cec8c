# SPDX-License-Identifier: Apache-2.0
"""Figures in pull-request texts are those of the benchmarks' JSON."""

import json
import re
from pathlib import Path

import pytest

from tools.overlay.base import ROOT
from tools.upstream.measured import MARK, TABLES, filled
from tools.upstream.series import SeriesError, load

RUN = {"device": {"name": "A GPU", "torch": "2", "copy_bytes_per_s": 1.0}}


def point(**repeat) -> dict:
    return {"acceptance_length": 4.0, "run": "2026-01-02T03", "repeats": [repeat]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    points = {
        "ours/pard/K7/equal/c8": point(tokens_per_s=300.0),
        "base-v1/pard/K7/equal/c8": point(tokens_per_s=150.0),
        "base-v2/pard/K7/equal/c8": point(tokens_per_s=100.0),
        "ours/draft/K7/equal/c1": point(tokens_per_s=50.0),
        "ours/pard/K3/by-position/c8": point(
            tokens_per_s=1.0, expected_tokens_per_s=200.0
        ),
        "ours/pard/K7/by-position/c8": point(
            tokens_per_s=1.0, expected_tokens_per_s=100.0
        ),
        "ours/pard/K7auto/by-position/c8": point(
            tokens_per_s=1.0, expected_tokens_per_s=190.0
        ),
    }
    write(tmp_path / "engine.json", points)
    tests = {
        "pard/greedy/T0.3": 0.25,
        "draft/block/T0.3": 0.5,
        "target/T0.3": 0.001,  # nothing was drafted
        "wrong rule/pard/T0.3": 1e-9,
        "wrong rule/draft/T0.3": 0.0,
    }
    rows = {name: {"p_value": p, "samples": 200} for name, p in tests.items()}
    write(tmp_path / "lossless.json", rows)
    return tmp_path


def write(path: Path, measurements: dict) -> None:
    found = {"runs": {"2026-01-02T03": RUN}, "measurements": measurements}
    path.write_text(json.dumps(found))


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_speed(folder: Path):
    """To the faster runner; what was not measured on both sides is no ratio."""
    head, _, *found = rows(TABLES["speed"](folder))
    assert head == ["drafter", "1", "8"]
    assert found == [["PARD", "–", "2.00×"]]


def test_auto(folder: Path):
    assert rows(TABLES["auto"](folder))[2:] == [["PARD", "95 %"]]


def test_lossless(folder: Path):
    text = TABLES["lossless"](folder)
    assert rows(text)[2:] == [["T0.3", "2", "0.2500", "2", "1e-09"]]
    assert "of 200 outputs" in text and "A GPU, torch 2, 2026-01-02." in text


def test_marks_are_filled(folder: Path):
    text = filled("before\n\n<!-- measured: auto -->\n\nafter\n", folder)
    assert re.fullmatch(r"(?s)before\n\n.*\| PARD \| 95 % \|\n\nafter\n", text)


@pytest.mark.parametrize(
    "name, error", [("luck", "there is auto, lossless, speed"), ("auto", "no results")]
)
def test_marks_that_cannot_be_filled(tmp_path: Path, name: str, error: str):
    with pytest.raises(SeriesError, match=error):
        filled(f"<!-- measured: {name} -->", tmp_path)


def test_texts_of_this_repository():
    """Who refers to results of the benchmarks shows them, and each table is used."""
    used = set()
    for patch in load().patches:
        text = (ROOT / patch.text).read_text()
        result = text.partition("## Test result")[2]
        marks = MARK.findall(result)
        used.update(marks)
        assert bool(marks) == ("benchmarks/results/" in result), patch.text
        assert all(
            rows(TABLES[mark](ROOT / "benchmarks/results/nvidia-h200"))[2:]
            for mark in marks
        )
    assert used == set(TABLES)
