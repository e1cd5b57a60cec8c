# SPDX-License-Identifier: Apache-2.0
"""Steps on this machine."""

import time

import pytest

from tests.ci.fakes import STEPS, TESTS, one_step, pipelines, repository
from tools.ci import local
from tools.ci.__main__ import main
from tools.ci.documents import PipelineError
from tools.ci.local import find, run, run_all, shard, share
from tools.ci.steps import test_files as files_below


def commands(*lines: str, **changes: str) -> str:
    listed = "".join(f"\n      - {line}" for line in lines)
    return one_step(commands=listed, **changes)


@pytest.mark.parametrize(
    ("name", "jobs"), [("One", [0]), ("one", [0]), ("Two %N", [0, 1]), ("Two 2", [1])]
)
def test_find(name, jobs, tmp_path):
    assert find(pipelines(tmp_path), name)[1] == jobs


def test_unknown_label(tmp_path, capsys):
    root = repository(tmp_path)
    assert main(["--root", str(root), "run", "Tow 1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("there is no step `Tow 1`: did you mean Two 1")
    assert said.count("\n") == 1


def test_commands_share_one_shell(tmp_path, capfd):
    area = commands("NAME=value", "cd src", 'echo "$$NAME $$(ls) $$OTHER"')
    ours = pipelines(tmp_path, area.rstrip() + "\n    env: {OTHER: x}\n")
    assert run(ours, "One") == 0
    assert capfd.readouterr().out == "--- One\nvalue a.py\nb.py x\n"


def test_the_first_failure_ends_a_step(tmp_path, capfd):
    ours = pipelines(tmp_path, commands("echo a", "(exit 7)", "echo b"))
    assert run(ours, "One") == 7
    assert capfd.readouterr().out == "--- One\na\n"


def test_programs_of_this_environment_come_first(tmp_path, capfd):
    ours = pipelines(tmp_path, commands("python -m pytest --version"))
    assert run(ours, "One") == 0
    assert "pytest" in capfd.readouterr().out


def test_time_is_up(tmp_path, capfd):
    start = time.monotonic()
    assert local.run_commands(["sleep 60 & wait"], tmp_path, {}, 0.005) == 124
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err == "It took more than its 0.005 minutes.\n"


def test_jobs_run_in_turn(tmp_path, capfd):
    line = "python -m tools.ci shard tests/two"
    said = "echo $$BUILDKITE_PARALLEL_JOB of $$BUILDKITE_PARALLEL_JOB_COUNT"
    ours = pipelines(tmp_path, STEPS.replace(line, said))
    assert run(ours, "Two %N") == 0
    assert capfd.readouterr().out == "--- Two 1\n0 of 2\n--- Two 2\n1 of 2\n"
    assert run(ours, "Two 2") == 0
    assert capfd.readouterr().out == "--- Two 2\n1 of 2\n"


def test_a_gpu_step_says_what_it_needs(tmp_path, monkeypatch):
    ours = pipelines(tmp_path)
    monkeypatch.setattr(local, "num_gpus", lambda: 1)
    with pytest.raises(PipelineError, match=r"GPU needs 2 h200, this machine has 1"):
        run(ours, "GPU")
    monkeypatch.setattr(local, "num_gpus", lambda: 2)
    monkeypatch.setattr(local, "run_commands", lambda *args: 0)
    assert run(ours, "GPU") == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_jobs_share_the_files(count):
    files = [f"test_{i}.py" for i in range(5)]
    shares = [share(files, job, count) for job in range(count)]
    assert sorted(name for files in shares for name in files) == files
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.fixture
def pytests(monkeypatch):
    """The pytests that would have been run: paths and flags."""
    runs: list[tuple[list[str], list[str]]] = []
    record = lambda paths, root, flags: runs.append((paths, flags)) or 0  # noqa: E731
    monkeypatch.setattr(local, "run_pytest", record)
    return runs


def test_shard(tmp_path, monkeypatch, pytests):
    root = repository(tmp_path)
    monkeypatch.setenv(local.JOB_COUNT, "2")
    for job in "01":
        monkeypatch.setenv(local.JOB, job)
        assert main(["--root", str(root), "shard", "tests/two"]) == 0
    run_files = [path for paths, _ in pytests for path in paths]
    assert sorted(run_files) == files_below(["tests/two"], root)
    assert len(run_files) == len([name for name in TESTS if "two" in name])


def test_a_shard_without_files_does_not_run_all_tests(tmp_path, monkeypatch, pytests):
    monkeypatch.setenv(local.JOB_COUNT, "4")
    monkeypatch.setenv(local.JOB, "3")
    with pytest.raises(PipelineError, match=r"tests/two: fewer test files than 4 jobs"):
        shard(["tests/two"], repository(tmp_path))
    assert not pytests


def test_make_test_is_one_pytest_of_all_cpu_steps(tmp_path, pytests, capfd):
    area = STEPS.replace(
        "- pytest tests/one", "- echo linted\n      - pytest tests/one"
    )
    assert run_all(pipelines(tmp_path, area), ["-n", "2"]) == 0
    assert capfd.readouterr().out == "--- One\nlinted\n"
    assert pytests == [(["tests/one", "tests/two"], ["-n", "2"])]


def test_make_test_stops_before_the_tests(tmp_path, pytests):
    area = STEPS.replace("- pytest tests/one", "- (exit 3)\n      - pytest tests/one")
    assert run_all(pipelines(tmp_path, area), []) == 3
    assert not pytests


def test_pytest_reports_a_failing_test(tmp_path):
    root = repository(tmp_path)
    flags = ["-q", "-p", "no:cacheprovider", "--rootdir", str(root)]
    assert local.run_pytest(["tests/one"], root, flags) == 0
    (root / "tests/one/test_a.py").write_text("def test():\n    assert False\n")
    assert local.run_pytest(["tests/one"], root, flags) == 1
