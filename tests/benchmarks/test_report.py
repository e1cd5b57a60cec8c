# SPDX-License-Identifier: Apache-2.0
"""The report on measured points."""

import json
from pathlib import Path

import pytest

from benchmarks.spec_decode import report
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.report import beside, compare, points


def point(*speeds: float, step_s: float = 0.01) -> dict:
    repeats = [
        {"tokens_per_s": speed, "step_s": step_s, "expected_tokens_per_s": speed}
        for speed in speeds
    ]
    return {"run": "r", "repeats": repeats}


@pytest.fixture
def results() -> files.Results:
    return {
        "runs": {"r": {"command": "x", "device": {}}},
        "engines": {"ours/pard/K7": {"start_s": 90.0, "run": "r"}},
        "measurements": {
            "ours/none/K0/equal/c8": point(50.0),
            "ours/draft/K7/equal/c8": point(300.0, 200.0, 400.0),
            "base-v2/draft/K7/equal/c8": point(100.0, step_s=0.02),
            "base-v1/draft/K7/equal/c8": point(150.0, step_s=0.015),
            "ours/draft/K3/equal/c8": point(310.0),
            "ours/pard/K7/equal/c8": point(500.0),
            "ours/pard@qwen3-8b/K7/equal/c8": point(900.0),
            "ours/pard/K7/recorded-t0.5/c1@4096": point(100.0),
            "ours/pard/K11/recorded-t0.5/c1@4096": point(110.0),
            "ours/pard/K7tree31/recorded-t0.5/c1@4096": point(132.0),
            "base-v1/pard/K7/recorded-t0.5/c1@4096": point(88.0),
            "ours/none/K0/recorded-t0.5/c1@4096": point(44.0),
        },
    }


def test_best_of_each_implementation(results: files.Results):
    found = points(results)
    row = found.set_index("point").loc["ours/draft/K7/equal/c8"]
    assert (row["tokens/s"], row["± %"]) == (300.0, pytest.approx(100 / 3))
    best = beside(found[found["acceptance"] == "equal"], ["shapes", "mode"])
    row = best.loc[("llama-3.1-8b", "draft")]
    assert row["ours: setting"] == "K3" and row["vLLM: tokens/s"] == 150
    assert row["ratio"] == pytest.approx(310 / 150)


def test_ratio_is_to_fastest_runner_at_same_point(results: files.Results):
    found = compare(points(results)).set_index("point")
    assert found.loc["ours/draft/K7/equal/c8", "to vLLM"] == pytest.approx(2.0)
    row = found.loc["ours/pard/K7tree31/recorded-t0.5/c1@4096"]
    assert row["to the best chain"] == pytest.approx(1.2)
    assert row["to vLLM's best"] == pytest.approx(1.5)
    assert row["to none"] == pytest.approx(3.0)
    assert found.loc["base-v1/draft/K7/equal/c8", ["to vLLM", "to none"]].isna().all()


def test_report_per_device(results: files.Results, tmp_path: Path):
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    (folder / "engine.json").write_text(json.dumps(results))
    report.main(["--results", str(tmp_path)])
    text = (folder / "report.md").read_text()
    assert "| qwen3-8b " in text and "nan" not in text.lower()
