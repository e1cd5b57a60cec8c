# SPDX-License-Identifier: Apache-2.0
"""What counts as a difference between the release and this tree."""

import json

import pytest

from tools.upstream_tests.compare import differences, read, report

FILE = "tests/test_a.py"
ONE, TWO = f"{FILE}::test_one", f"{FILE}::test_two"
PASSED = {ONE: "passed", TWO: "passed", FILE: ""}


def test_a_failure_in_teardown_is_a_failure(tmp_path):
    lines = [[ONE, "passed"], [ONE, "failed: OSError"], [TWO, "passed"]]
    (tmp_path / "results").write_text("\n".join(map(json.dumps, lines)))
    assert read(tmp_path / "results") == {ONE: "failed: OSError", TWO: "passed"}


@pytest.mark.parametrize(
    "release", [PASSED, {TWO: "failed: x", FILE: ""}, PASSED | {FILE: "time limit"}]
)
def test_only_what_passes_on_the_release_and_not_here_differs(release):
    ours = {ONE: "passed", TWO: "skipped: no GPU", FILE: ""}
    found = {TWO: "skipped: no GPU"} if release is PASSED else {}
    assert differences(release, ours) == found
    assert differences(release, PASSED) == {}


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("failed: ImportError", "failed: ImportError"),
        ("exit status -11", "exit status -11"),
        ("", "there is no such test here"),
    ],
)
def test_what_does_not_run_here_differs(how, why):
    found = differences(PASSED, {ONE: "passed", FILE: how})
    assert found == {TWO: f"did not run: {why}"}


def test_a_difference_is_reported_unless_it_is_accepted():
    found = {f"{ONE}[a]": "failed: x", f"{ONE}[b]": "failed: y", TWO: "failed: z"}
    assert report(found, {ONE: "by design"}, [FILE]) == [f"{TWO}: failed: z"]
    assert report({}, {ONE: "by design"}, ["tests/test_b.py"]) == []
    (line,) = report({}, {ONE: "by design"}, [FILE])
    assert line.startswith(f"{ONE}: accepted, and differs no more")
