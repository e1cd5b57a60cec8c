# SPDX-License-Identifier: Apache-2.0
"""Which steps a change runs."""

import subprocess

import pytest

from tests.ci.fakes import AREA, pipelines, repository
from tools.ci.documents import PipelineError
from tools.ci.select import changed_since, select
from tools.ci.steps import ROOT, load


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["src/a.py"], "one gpu"),
        (["src/b.py"], "one two gpu"),
        (["other/a.py"], "two"),
        (["other/not/a.py", "src/b.py"], "one two gpu"),
        (["tests/one/test_a.py"], "one gpu"),
        (["tests/two/sub/helper.py"], "two"),
        ([AREA], "one two gpu"),
        (["README.md"], ""),
        ([], ""),
        (["base.toml"], "one two gpu"),
        (["base.md"], ""),
        (["new/file.py"], "one two gpu"),
        (None, "one two gpu"),
    ],
)
def test_select(changed, expected, tmp_path):
    steps = select(pipelines(tmp_path), changed).steps
    assert [step.key for step in steps] == expected.split()


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        (["src/a.py", "base.toml"], "base.toml concerns everything"),
        (["new/file.py"], "no step knows new/file.py"),
        (None, "all were asked for"),
        (["src/a.py"], None),
    ],
)
def test_why_all(changed, because, tmp_path):
    assert select(pipelines(tmp_path), changed).all_because == because


def test_what_a_step_waits_for_comes_along(tmp_path):
    area = """\
        group: Area
        steps:
          - {label: B, key: b, device: cpu, timeout_in_minutes: 1, depends_on: [a],
             source_file_dependencies: [src/b.py], commands: [make]}
          - {label: A, key: a, device: cpu, timeout_in_minutes: 1, depends_on: [c],
             source_file_dependencies: [src/a.py], commands: [make]}
          - {label: C, key: c, device: cpu, timeout_in_minutes: 1,
             source_file_dependencies: [other/], commands: [make]}
        """
    steps = select(pipelines(tmp_path, area), ["src/b.py"]).steps
    assert [step.key for step in steps] == ["b", "a", "c"]


def test_a_step_without_dependencies_always_runs(tmp_path):
    area = """\
        group: Area
        steps:
          - {label: A, key: a, device: cpu, timeout_in_minutes: 1, commands: [make]}
        """
    assert select(pipelines(tmp_path, area), ["README.md"]).steps


@pytest.mark.parametrize(
    ("path", "some", "none"),
    [
        ("csrc/prepare_inputs.cpp", {"speculator", "e2e", "packages"}, {"config"}),
        ("vllm/config/drafter/drafter.py", {"config", "e2e", "gpu-e2e"}, {"packages"}),
        ("benchmarks/README.md", {"benchmark-harness"}, {"e2e", "overlay"}),
        ("docs/performance.md", {"docs", "lint"}, {"e2e", "overlay", "config"}),
        ("base.toml", {"e2e", "overlay", "tp2", "docs"}, set()),
    ],
)
def test_this_repository(path, some, none):
    assert (ROOT / path).exists()
    keys = {step.key for step in select(load(), [path]).steps}
    assert keys >= some and not keys & none


def git(root, *args: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)


def test_changed_since(tmp_path):
    root = repository(tmp_path)
    git(root, "init", "-b", "main")
    git(root, "add", ".")
    git(root, "commit", "-m", "Start")
    git(root, "switch", "-c", "branch")
    (root / "src/a.py").write_text("new")
    (root / "src/b.py").rename(root / "src/c.py")
    git(root, "add", "-A")
    git(root, "commit", "-m", "Change")
    git(root, "switch", "main")
    (root / "other/a.py").write_text("not of the branch")
    git(root, "commit", "-am", "Meanwhile")
    git(root, "switch", "branch")
    (root / "tests/one/test_a.py").write_text("not yet committed")
    (root / "src/d.py").write_text("not yet added")
    assert changed_since("main", root) == [
        "src/a.py",
        "src/b.py",
        "src/c.py",
        "src/d.py",
        "tests/one/test_a.py",
    ]
    with pytest.raises(PipelineError, match=r"--since nowhere: .*nowhere"):
        changed_since("nowhere", root)
