# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference between the release and this tree."""

import json
from pathlib import Path

import pytest

from tools.upstream_tests.compare import differences, read, report

FILE = "tests/test_a.py"
ONE, TWO = f"{FILE}::test_one", f"{FILE}::test_two"
ENDED = [FILE, "ended", "", 1.0]
PASSED = [[ONE, "passed", ""], [TWO, "passed", ""], ENDED]


@pytest.fixture
def differ(tmp_path: Path):
    """`differences` of two lists of lines."""

    def differ(release: list, ours: list) -> dict[str, str]:
        paths = tmp_path / "release", tmp_path / "ours"
        for path, lines in zip(paths, (release, ours), strict=True):
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return differences(*paths, files=[FILE])

    return differ


def test_a_failure_in_teardown_is_a_failure(tmp_path):
    lines = [[ONE, "passed", ""], [ONE, "failed", "OSError"], [TWO, "passed", ""]]
    (tmp_path / "results").write_text("\n".join(map(json.dumps, lines)))
    assert read(tmp_path / "results")[0] == {ONE: "failed: OSError", TWO: "passed"}


def test_what_passes_on_both_does_not_differ(differ):
    assert differ(PASSED, PASSED) == {}


def test_a_file_that_is_not_asked_for_is_not_compared(differ):
    release = [["tests/test_b.py::test", "passed", ""], *PASSED]
    assert differ(release, PASSED) == {}


def test_what_fails_on_the_release_is_not_compared(differ):
    assert differ([[ONE, "failed", ""], ENDED], [ENDED]) == {}


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_what_does_not_pass_here_differs(differ, outcome):
    ours = [[ONE, outcome, "AssertionError"], [TWO, "passed", ""], ENDED]
    assert differ(PASSED, ours) == {ONE: f"{outcome}: AssertionError"}


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ([[FILE, "failed", "ImportError"], ENDED], "failed: ImportError"),
        ([[FILE, "ended", "exit status -11", 1.0]], "exit status -11"),
        ([[FILE, "ended", "time limit", 9.0]], "time limit"),
        ([ENDED], "there is no such test here"),
    ],
    ids=["import", "crash", "hang", "renamed"],
)
def test_what_does_not_run_here_differs(differ, ours, why):
    ours = [[ONE, "passed", ""], *ours]
    assert differ(PASSED, ours) == {TWO: f"did not run: {why}"}


def test_a_file_that_hangs_on_the_release_is_not_compared(differ):
    release = [*PASSED[:2], [FILE, "ended", "time limit", 9.0]]
    assert differ(release, [ENDED]) == {}


def test_a_difference_is_reported_unless_it_is_accepted():
    found = {f"{ONE}[a]": "failed: x", f"{ONE}[b]": "failed: y", TWO: "failed: z"}
    assert report(found, {ONE: "by design"}, [FILE]) == [f"{TWO}: failed: z"]


def test_an_acceptance_that_nothing_needs_is_reported():
    (line,) = report({}, {ONE: "by design"}, [FILE])
    assert line.startswith(ONE)
    assert report({}, {ONE: "by design"}, ["tests/test_b.py"]) == []
