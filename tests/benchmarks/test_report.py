# SPDX-License-Identifier: Apache-2.0
"""What the report says of measured points."""

import json
from pathlib import Path

import pytest

from benchmarks.spec_decode import report
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.report import beside, by_setting, markdown, points


def point(*speeds: float, step_s: float = 0.01, **more) -> dict:
    repeats = [
        {"tokens_per_s": speed, "step_s": step_s, "expected_tokens_per_s": speed}
        for speed in speeds
    ]
    return {"run": "r", "acceptance_length": 3.5, "repeats": repeats, **more}


@pytest.fixture
def results() -> files.Results:
    engine = {"target_bytes": 16e9, "draft_bytes": 1e9, "run": "r"}
    return {
        "runs": {"r": {"command": "x", "device": {"copy_bytes_per_s": 4e12}}},
        "engines": {"ours/draft/K7": engine, "ours/pard/K7": engine},
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


def main_points(results: files.Results, acceptance: str):
    found = points(results)
    return found[(found["acceptance"] == acceptance) & (found["shapes"] != "qwen3-8b")]


def test_medians_and_spread(results: files.Results):
    found = points(results).set_index("point").loc["ours/draft/K7/equal/c8"]
    assert found["tokens/s"] == 300.0
    assert found["± %"] == pytest.approx(100 / 3)


@pytest.mark.parametrize(("mode", "passes"), [("draft", 7), ("pard", 1)])
def test_share_of_the_memory_floor(mode: str, passes: int, results: files.Results):
    found = points(results).set_index("point").loc[f"ours/{mode}/K7/equal/c8"]
    floor = (16e9 + passes * 1e9) / 4e12
    assert found["of the floor"] == pytest.approx(floor / 0.01)


def test_ratio_is_to_the_faster_runner_at_its_best_setting(results: files.Results):
    equal = main_points(results, "equal")
    best = beside(equal, report.PLACE, ["setting"]).loc[("draft", 128, 8)]
    assert best["vLLM: runner"] == "base-v1" and best["ours: setting"] == "K3"
    assert best["ratio"] == pytest.approx(310 / 150)
    at_k7 = beside(equal, ["mode", "K"], []).loc[("draft", 7)]
    assert at_k7["ratio"] == pytest.approx(2.0)
    assert at_k7["ratio of steps"] == pytest.approx(1.5)


def test_a_tree_stands_beside_the_best_chain(results: files.Results):
    row = by_setting(main_points(results, "recorded-t0.5")).loc[("pard", 4096, 1)]
    assert row["K7tree31 to the best chain"] == pytest.approx(1.2)
    assert row["best to vLLM's best"] == pytest.approx(1.5)
    assert row["best to no speculation"] == pytest.approx(3.0)


def test_a_report_of_each_device(results: files.Results, tmp_path: Path):
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    (folder / "engine.json").write_text(json.dumps(results))
    serving = {"measurements": {"ours/peagle/K7/rateinf": {"output_throughput": 20.5}}}
    (folder / "serving.json").write_text(json.dumps(serving))
    report.main(["--results", str(tmp_path)])
    text = (folder / "report.md").read_text()
    assert "| ours/peagle/K7/rateinf |" in text and "20.5" in text
    assert "## Shapes of qwen3-8b" in text and "nan" not in text.lower()


def test_nothing_measured_is_no_table():
    assert markdown(report.flat({})) == ""
    assert list(report.engine_sections({})) == []
