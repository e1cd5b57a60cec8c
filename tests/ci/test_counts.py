# SPDX-License-Identifier: Apache-2.0
"""What a run of tests came to, read off the files that pytest writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.ci import counts
from tools.ci.counts import Case, cases, main, merged, sources, summary

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


RAN_ON = {"base": "1.0", "device": "a GPU", "software": "torch 1"}


def record(*found: Case, commit: str, **more) -> dict:
    made = summary(list(found))
    files = {file: {"commit": commit} for file in made["files"]}
    return {**RAN_ON, **made, "date": commit, "sources": files, **more}


def test_a_newer_run_replaces_its_files_alone():
    old = record(
        Case("a.py", "x", "failed"),
        Case("a.py", "gone", "passed"),
        Case("b.py", "y", "failed"),
        commit="1",
        why={"a.py::x": "too slow", "b.py::y": "too short"},
        unfinished=["a.py::z"],
    )
    new = record(Case("a.py", "x", "passed"), Case("c.py", "w", "failed"), commit="2")
    assert merged(old, new) == {
        **RAN_ON,
        "date": "2",
        "total": {"passed": 1, "failed": 2},
        "files": {"a.py": {"passed": 1}, "b.py": {"failed": 1}, "c.py": {"failed": 1}},
        "failed": ["b.py::y", "c.py::w"],
        "unfinished": [],
        "why": {"b.py::y": "too short"},
        "sources": {
            "a.py": {"commit": "2"},
            "b.py": {"commit": "1"},
            "c.py": {"commit": "2"},
        },
    }


def test_a_commit_that_nobody_knows_is_not_the_last_runs():
    case = Case("a.py", "x", "passed")
    new = record(case, commit="2") | {"sources": {}}
    assert merged(record(case, commit="1"), new)["sources"] == {}


@pytest.mark.parametrize("what", RAN_ON)
def test_runs_of_two_machines_are_two_records(what: str):
    case = Case("a.py", "x", "passed")
    new = record(case, commit="2") | {what: "another"}
    with pytest.raises(ValueError, match=f"of {what} .*another --output"):
        merged(record(case, commit="1"), new)


def test_merging_into_a_file(junit: Path, tmp_path: Path):
    output = tmp_path / "counts.json"
    command = [str(junit), "--output", str(output), "--merge"]
    main(command)
    once = json.loads(output.read_text())
    main(command)
    assert json.loads(output.read_text()) == {**once, "why": {}, "unfinished": []}
    output.write_text(json.dumps(once | {"base": "0.1"}))
    with pytest.raises(SystemExit):
        main(command)
    assert json.loads(output.read_text())["base"] == "0.1"


def test_sources(monkeypatch, tmp_path: Path, capsys):
    def no_checkout(output: Path):
        raise subprocess.CalledProcessError(128, ["git"])

    monkeypatch.setattr(counts, "provenance", lambda output: {"commit": "1"})
    assert sources(["a.py"], tmp_path) == {"a.py": {"commit": "1"}}
    monkeypatch.setattr(counts, "provenance", no_checkout)
    assert sources(["a.py"], tmp_path) == {}
    assert "no commit is recorded" in capsys.readouterr().out
