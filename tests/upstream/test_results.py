# SPDX-License-Identifier: Apache-2.0
"""What `try` records, and what is said of it."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tools.overlay.base import load_config
from tools.upstream import trial
from tools.upstream.results import (
    WHOLE,
    Tried,
    counted,
    load,
    outcome,
    record,
    result_table,
    sentence,
    whole_sentence,
)
from tools.upstream.series import load as load_series

PATCH = "[Bugfix] One thing"
RUN = "python -m tools.upstream try"


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        ("..\n2 passed in 3.85s\n", {"passed": 2}),
        (
            "1 failed, 20 passed, 3 skipped, 14 warnings in 9.1s (0:00:09)",
            {"failed": 1, "passed": 20, "skipped": 3},
        ),
        ("12 passed, 2 errors in 3s", {"passed": 12, "errors": 2}),
        ("3 passed\nINTERNALERROR", {}),
        ("", {}),
    ],
)
def test_outcomes_are_counted(said: str, counts: dict[str, int]):
    assert counted(said) == counts


@pytest.mark.parametrize(
    ("broken", "counts", "is_good"),
    [
        ({}, {}, True),
        ({}, {"passed": 2, "skipped": 1}, True),
        ({"vllm.x": "ImportError"}, {"passed": 2}, False),
        ({}, {"passed": 2, "failed": 1}, False),
        ({}, {"errors": 1}, False),
    ],
)
def test_good(broken: dict, counts: dict, is_good: bool):
    assert Tried(PATCH, 3, broken, counts).is_good is is_good


def test_each_kind_of_run_is_kept(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("VLLM_TEST_EXAMPLES", "9")
    path = tmp_path / "results.json"
    record([Tried(PATCH, 3, {}, {"passed": 9})], [], "cpu", path)
    record([Tried(WHOLE, 7, {}, {"passed": 99})], ["-k", "not x"], "cpu", path)
    record([Tried(PATCH, 3, {}, {"passed": 8})], [], "cpu", path)
    runs = load(path)
    assert runs.keys() == {"each", "whole"}
    assert "3 of 3 modules import; tests: 8 passed." in sentence(PATCH, runs)
    assert sentence("[Bugfix] Another", runs) == ""
    assert "7 of 7 modules import; tests: 99 passed." in whole_sentence(runs)
    assert whole_sentence({}) == ""
    table = result_table(path)
    assert f"| {PATCH} | 3 of 3 modules import; tests: 8 passed |" in table
    assert "7 of 7 modules import; tests: 99 passed" in table
    assert "pytest with `-k 'not x' VLLM_TEST_EXAMPLES=9`" in table


def made_of(files: Iterable[str]) -> tuple[int, int]:
    """How many modules there are, and how many test files."""
    files = set(files)
    return sum(map(trial.is_module, files)), len(trial.test_files(files))


def stale(kind: str) -> list[str]:
    """In what a recorded run is not of this series."""
    series, run = load_series(), load()[kind]
    homes = series.homes()
    files = [series.files(number, homes) for number in range(len(series.patches))]
    now = dict(zip([patch.title for patch in series.patches], files, strict=True))
    if kind == "whole":
        now = {WHOLE: [file for some in files for file in some]}
    before = {one["title"]: Tried(**one) for one in run["results"]}
    lines = [f"not tried: {title}" for title in now.keys() - before.keys()]
    lines += [f"not in the series: {title}" for title in before.keys() - now.keys()]
    for title in now.keys() & before.keys():
        found = before[title]
        modules, tests = made_of(now[title])
        if found.modules != modules:
            lines.append(f"{title}: {modules} modules, {found.modules} recorded")
        if found.test_files not in (None, tests):
            lines.append(f"{title}: {tests} test files, {found.test_files} recorded")
    if not lines and list(before) != list(now):
        lines.append("another order")
    if run["base"] != load_config()["version"]:
        lines.append(f"recorded on {run['base']}")
    return lines


@pytest.mark.parametrize("kind, options", [("each", "--each "), ("whole", "")])
def test_recorded_is_of_this_series(kind: str, options: str):
    found = stale(kind)
    assert not found, "\n".join(
        [
            f"tools/upstream/results.json is of another series. Run `{RUN} {options}"
            "--output DIR --record`, then `python -m tools.docs`.",
            *found,
        ]
    )


def test_what_is_recorded_is_good():
    assert all(
        Tried(**one).is_good for run in load().values() for one in run["results"]
    )


def test_what_failed_is_said():
    found = {"modules": 3, "broken": {"vllm.x": "no"}, "counts": {"failed": 1}}
    assert outcome(found) == "2 of 3 modules import; tests: 1 failed"
    assert outcome({"modules": 1, "broken": {}, "counts": {}}).endswith("tests: none")
