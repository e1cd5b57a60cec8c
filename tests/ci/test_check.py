# SPDX-License-Identifier: Apache-2.0
"""What is wrong although each file is well formed."""

import pytest

from tests.ci.fakes import (
    AREA,
    CONFIG,
    FIRST,
    STEPS,
    one_step,
    pipelines,
    repository,
    write,
)
from tools.ci.__main__ import main
from tools.ci.check import check
from tools.ci.steps import ROOT, load

SECOND = one_step().partition("steps:\n")[2]


def test_this_repository():
    """Among others: each test file runs in exactly one CPU step, each path exists."""
    assert check(load()) == []


def test_each_kind_of_step_is_there():
    steps = load().steps
    assert {step.device for step in steps} >= {"cpu", "h100", "h200"}
    assert any(step.jobs > 1 for step in steps)
    assert any(step.data.get("soft_fail") for step in steps)
    assert any(step.data.get("num_devices") == 2 for step in steps)
    assert {step.optional for step in steps if step.device == "cpu"} == {True, False}


def test_small_repository(tmp_path):
    assert check(pipelines(tmp_path)) == []


PROBLEMS = {
    "path": (
        one_step(source_file_dependencies="\n      - src/\n      - src/c.py"),
        "10: One: there is no src/c.py",
    ),
    "excluded path": (
        one_step(source_file_dependencies='["!src/c.py"]'),
        "8: One: there is no src/c.py",
    ),
    "folder without slash": (
        one_step(source_file_dependencies="[src]"),
        "8: One: src: a folder ends with /",
    ),
    "file with slash": (
        one_step(source_file_dependencies="[src/a.py/]"),
        "8: One: ",
    ),
    "path twice": (
        one_step(source_file_dependencies="[src/, src/]"),
        "8: One: src/ is there twice",
    ),
    "no such test": (
        one_step(commands="\n      - make\n      - pytest tests tests/no"),
        "11: One: there is no tests/no",
    ),
    "device": (one_step(device="abacus"), "6: One: unknown device `abacus`, use cpu,"),
    "too many devices": (
        STEPS.replace("num_devices: 2", "num_devices: 3"),
        "21: GPU: h200 comes as 1, 2",
    ),
    "label twice": (
        one_step() + SECOND.replace("key: one", "key: two"),
        f"11: One: {AREA}:4 has this label too",
    ),
    "key twice": (
        one_step() + SECOND.replace("label: One", "label: Two"),
        f"12: Two: {AREA}:4 has this key too",
    ),
    "dependency": (
        one_step(depends_on="[two]"),
        "4: One: depends on `two`, which no step",
    ),
    "on itself": (
        one_step(depends_on="[one]"),
        "4: One: depends on `one`, which waits for",
    ),
    "on an optional one": (
        STEPS.replace("[one]", "[two]").replace(
            "key: two\n", "key: two\n    depends_on: [gpu]\n"
        ),
        "10: Two %N: depends on `gpu`, which is optional",
    ),
    "a bare dollar": (
        one_step(commands="\n      - echo $HOME\n      - echo $$HOME"),
        "10: One: Buildkite fills in `$`",
    ),
    "no number in the label": (
        STEPS.replace("Two %N", "Two"),
        "10: Two: has parallelism, put %N",
    ),
    "a number in the label": (one_step(label="One %N"), "4: One %N: has %N or a shard"),
    "a shard of one": (
        one_step(commands="[python -m tools.ci shard tests]"),
        "4: One: has %N or a shard, give it parallelism",
    ),
    "equal jobs": (
        STEPS.replace("python -m tools.ci shard", "pytest"),
        "17: Two %N: all its jobs do the same",
    ),
    "more jobs than files": (
        STEPS.replace("parallelism: 2", "parallelism: 4"),
        "13: Two %N: 4 jobs for 3 test files",
    ),
    "a flag for pytest": (
        one_step(commands="[pytest -x tests]"),
        "9: One: -x: `make test` has one pytest",
    ),
    "an environment": (
        one_step(env="{A: b}"),
        "10: One: `make test` has one environment",
    ),
    "a test in two steps": (
        STEPS.replace("shard tests/two", "shard tests"),
        "10: Two %N: runs tests/one/test_a.py, as One does",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problem(name, tmp_path):
    area, expected = PROBLEMS[name]
    found = check(pipelines(tmp_path, area))
    assert any(line.startswith(f"{AREA}:{expected}") for line in found), found


FIRST_PROBLEMS = {
    "queue": (("small", "slow"), "4: no such queue, use small, big"),
    "key": (("generate", "one"), "3: another step has the key one"),
    "no script": (("upload", "load"), "7: .buildkite/load.sh: no script that can be"),
    "dollar": (("upload.sh", "upload.sh $A"), "7: Buildkite fills in `$`"),
    "no text": (("Generate", "3"), "2: `label` must be string, is 3"),
    "unknown key": (("label", "lable"), "2: unknown key `lable`, did you mean `label`"),
    "no YAML": (("{queue", "[queue"), "4: expected ',' or ']'"),
}


@pytest.mark.parametrize("name", FIRST_PROBLEMS)
def test_problems_of_the_first_step(name, tmp_path, capsys):
    change, expected = FIRST_PROBLEMS[name]
    root = repository(tmp_path)
    write(root, ".buildkite/pipeline.yaml", FIRST.replace(*change))
    assert main(["--root", str(root), "check"]) == 1
    assert f".buildkite/pipeline.yaml:{expected}" in capsys.readouterr().err


def test_a_script_that_cannot_be_run(tmp_path):
    root = repository(tmp_path)
    (root / ".buildkite/upload.sh").chmod(0o644)
    (found,) = check(load(root))
    assert found.startswith(".buildkite/pipeline.yaml:7: ")


def test_a_test_that_no_cpu_step_runs(tmp_path, capsys):
    root = repository(tmp_path)
    write(root, "tests/three/deep/test_x.py", "")
    assert main(["--root", str(root), "check"]) == 1
    assert capsys.readouterr().err == (
        "tests/three/deep/test_x.py:1: no CPU step runs it, name its folder in an area "
        "of .buildkite/test_areas\n"
    )


def test_a_gpu_step_does_not_stand_for_a_cpu_step(tmp_path):
    found = check(pipelines(tmp_path, STEPS.replace("- pytest tests/one", "- make")))
    assert [line.partition(": ")[0] for line in found] == ["tests/one/test_a.py:1"]


def test_a_bad_pattern(tmp_path):
    config = CONFIG.replace("[^base]", "['(']")
    (found,) = check(pipelines(tmp_path, config=config))
    assert found.startswith(".buildkite/ci_config.yaml:2: `(`: missing )")


def test_make_runs_the_steps():
    """`make test` and `make lint` have no list of their own."""
    lines = (ROOT / "Makefile").read_text().split("\n")
    assert "\t$(BIN)/python -m tools.ci test -- $(PYTEST_ARGS)" in lines
    assert "\t$(BIN)/python -m tools.ci run Lint" in lines
