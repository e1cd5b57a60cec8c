# SPDX-License-Identifier: Apache-2.0
"""Tables, and the document that they stand in."""

from pathlib import Path

import pytest

from benchmarks.spec_decode import report, tables
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import Comparison
from benchmarks.spec_decode.report import BEGIN, END, between_markers
from benchmarks.spec_decode.shape_tables import TITLES, shape_sections
from benchmarks.spec_decode.tables import table


def point(speed: float, length: float = 3.5) -> dict:
    repeat = {"tokens_per_s": speed, "step_s": 0.01, "draft_s": 0.001, "tpot_s": 0.003}
    return {"run": "2026", "acceptance_length": length, "repeats": [repeat]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    device = {"name": "NVIDIA H200", "torch": "2", "copy_bytes_per_s": 4e12}
    engine = {"target_bytes": 10**10, "draft_bytes": 10**9, "vllm": "0.32.0"}
    measurements = {
        "ours/peagle/K7/equal/c1": point(600.0),
        "base-v1/peagle/K7/equal/c1": point(500.0),
        "ours/peagle/K7/mt-bench/c1": point(620.0),
        "ours/eagle3/K3/mt-bench/c1": point(310.0),
    }
    files.save(
        tmp_path / "results" / "nvidia-h200" / "engine.json",
        {
            "runs": {"2026": {"device": device}},
            "engines": {"ours/peagle/K7": engine},
            "measurements": measurements,
            "failures": {"base-v2/draft/K7": {"error": "ValueError: no"}},
        },
    )
    return tmp_path


def test_chosen_draft_length_beside_fixed_ones():
    def at(speed: float, drafted: dict[str, int]) -> dict:
        repeat = {"tokens_per_s": 1.0, "expected_tokens_per_s": speed, "step_s": 0.01}
        return {"acceptance_length": 3.5, "repeats": [{**repeat, "drafted": drafted}]}

    measurements = {
        "ours/pard/K3/by-position/c8": at(2000.0, {"3": 9}),
        "ours/pard/K7/by-position/c8": at(1600.0, {"7": 9}),
        "ours/pard/K11auto/by-position/c8": at(1900.0, {"3": 3, "4": 1}),
        "ours/pard/K7/by-position/c1": at(300.0, {"7": 9}),
        "base-v1/pard/K7/equal/c8": at(1500.0, {}),
    }
    found = tables.auto_table(Comparison({"measurements": measurements}), "pard")
    row = "| 8 | 2000 | 1600 | 1900 (mean K 3.2) | 0.95× | 0.68× | – |"
    assert row in found
    assert len(found.splitlines()) == 3


def test_other_shapes_have_tables_of_their_own():
    engine = {
        "target_bytes": None,  # a mixture of experts
        "draft_bytes": 10**9,
        "drafter": "EagleDrafter",
        "start_s": 71.2,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "target_full_graphs": 35,
        "draft_full_graphs": 20,
    }
    results = {
        "runs": {"2026": {"device": {"copy_bytes_per_s": 4e12}}},
        "engines": {"ours/peagle@gpt-oss-20b/K7": engine, "ours/peagle/K7": engine},
        "measurements": {
            "ours/none@gpt-oss-20b/K0/equal/c1": point(200.0, 1.0),
            "ours/peagle@gpt-oss-20b/K7/equal/c1": point(500.0),
            "ours/none/K0/equal/c1": point(100.0, 1.0),
        },
    }
    sections = dict(shape_sections(results))
    assert sections[TITLES["qwen3-8b"]] == ""
    lines = sections[TITLES["gpt-oss-20b"]].splitlines()
    name, graphs = "ours/peagle@gpt-oss-20b/K7", "FULL_AND_PIECEWISE | 35 | 20"
    assert lines[2] == f"| {name} | EagleDrafter | 71 | {graphs} |"
    speed = "500 | 2.50× | 3.00 | 10.00 | 9.00 | 1.00 | –"
    assert lines[-1] == f"| P-EAGLE | 7 | 1 | {speed} |"
    assert len(lines) == 3 + 1 + 4


def test_table():
    assert table(["a", "b"], [[1, None], ["x", 0.5]]) == (
        "| a | b |\n| ---: | ---: |\n| 1 | – |\n| x | 0.50 |\n"
    )
    assert table(["a"], []) == ""
    with pytest.raises(AssertionError, match="does not fit"):
        table(["a", "b"], [[1]])


def test_text_outside_the_markers_stays():
    first = between_markers("# Title\n", "one")
    assert first == f"# Title\n\n{BEGIN}\n\none\n\n{END}\n"
    again = between_markers(first + "\nBelow.\n", "two")
    assert again == f"# Title\n\n{BEGIN}\n\ntwo\n\n{END}\n\nBelow.\n"
    with pytest.raises(ValueError, match="both"):
        between_markers(BEGIN, "x")


def test_the_documentation_shows_all_results(tmp_path: Path):
    page = report.DOCS / "performance.md"
    copy = tmp_path / page.name
    copy.write_text(page.read_text())
    report.main(["--document", str(copy)])
    assert copy.read_text() == page.read_text(), "run benchmarks.spec_decode.report"


def test_document(folder: Path):
    document = folder / "docs" / "performance.md"
    arguments = ["--results", str(folder / "results"), "--document", str(document)]
    gpu = folder / "results" / "nvidia-h200"
    clean = {"reports": 0, "tests_passed": 15, "tests_failed": 1, "examples": 60}
    found = {"memcheck": clean, "memcheck of a planted write": {"reports": 64}}
    files.save(gpu / "sanitizer.json", {"measurements": found})
    (gpu / "traces").mkdir()
    (gpu / "traces" / "ours_peagle_K7_equal_c1.json.gz").touch()
    report.main(arguments)
    text = document.read_text()
    assert "| memcheck | 0 | 15 of 16 | 60 |" in text
    assert "| memcheck of a planted write | 64 | – | – |" in text
    assert "/traces/`: `ours_peagle_K7_equal_c1.json.gz`." in text
    assert "| P-EAGLE | 1 | 600 (K=7) | 500 (K=7) | 1.20× |" in text
    assert "| 620 (K=7) | 310 (K=3) | 2.00× | – | – | – | 1.55× |" in text
    assert "- base-v2/draft/K7: ValueError: no" in text
    assert "(images/nvidia-h200-ratio.png)" in text
    assert (document.parent / "images" / "nvidia-h200-ratio.png").stat().st_size > 1000
    report.main(arguments)
    assert document.read_text() == text
