# SPDX-License-Identifier: Apache-2.0
"""What a run of tests came to, read off the files that pytest writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.ci.counts import Case, cases, main, summary

TESTS = """
import pytest

@pytest.fixture
def breaks():
    raise OSError

@pytest.fixture
def breaks_later():
    yield
    raise OSError

def test_good(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_of_many(n): assert n == 1
def test_broken(breaks): pass
def test_broken_later(breaks_later): pass
@pytest.mark.skip
def test_left_out(): pass
@pytest.mark.xfail
def test_known(): assert False
"""


@pytest.fixture(scope="module")
def junit(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "sub").mkdir()
    (folder / "sub" / "test_all.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "--junitxml=run.xml"]
    command += ["-p", "no:cacheprovider", "sub"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert (folder / "run.xml").is_file(), done.stdout + done.stderr
    return folder / "run.xml"


def test_outcomes(junit: Path):
    found = {case.name: case.outcome for case in cases(junit)}
    assert found == {
        "test_good": "passed",
        "test_of_many[1]": "passed",
        "test_of_many[2]": "failed",
        "test_broken": "failed",
        "test_broken_later": "failed",
        "test_left_out": "skipped",
        "test_known": "skipped",
    }
    assert {case.file for case in cases(junit)} == {"sub/test_all.py"}


def test_an_interrupted_test_has_not_passed(tmp_path: Path):
    """What pytest writes of a test that was running as it was told to stop."""
    file = tmp_path / "run.xml"
    file.write_text(
        '<testsuites><testsuite><testcase time="1.0" /></testsuite></testsuites>'
    )
    assert list(cases(file)) == []


def test_summary():
    found = [Case("b.py", "x", "passed"), Case("a.py", "y[1]", "failed")]
    assert summary([*found, Case("b.py", "z", "passed")]) == {
        "total": {"passed": 2, "failed": 1},
        "files": {"a.py": {"failed": 1}, "b.py": {"passed": 2}},
        "failed": ["a.py::y[1]"],
    }


def test_several_files_are_one_run(junit: Path, tmp_path: Path):
    output = tmp_path / "counts.json"
    assert main([str(junit), str(junit), "--output", str(output)]) == 1
    found = json.loads(output.read_text())
    assert found["total"]["failed"] == 6
    assert found["base"][0].isdigit() and "torch" in found["software"]
