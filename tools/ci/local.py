# SPDX-License-Identifier: Apache-2.0
"""Runs steps on this machine: one by its label, or all that `make test` consists of."""

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from .documents import PipelineError
from .steps import CPU, Pipelines, Step, pytest_args, test_files

JOB, JOB_COUNT = "BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT"


def find(pipelines: Pipelines, label: str) -> tuple[Step, list[int]]:
    """The step of a label or key, and its jobs; with %N as a number, one of them.

    Raises:
        PipelineError: there is none.
    """
    names: dict[str, tuple[Step, list[int]]] = {}
    for step in pipelines.steps:
        jobs = list(range(step.jobs))
        names |= {step.label: (step, jobs), step.key: (step, jobs)}
        if step.jobs > 1:
            for job in jobs:
                names[step.label.replace("%N", str(job + 1))] = (step, [job])
    if label in names:
        return names[label]
    near = difflib.get_close_matches(label, names, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "see the list"
    raise PipelineError(f"there is no step `{label}`: {hint} (python -m tools.ci list)")


def run(pipelines: Pipelines, label: str) -> int:
    """Runs a step's jobs in turn; their exit status, 124 when the time is up."""
    step, jobs = find(pipelines, label)
    require_device(step)
    for job in jobs:
        env = {**step.data.get("env", {}), JOB: str(job), JOB_COUNT: str(step.jobs)}
        title = step.label.replace("%N", str(job + 1))
        print(f"--- {title}", flush=True)
        status = run_commands(
            step.commands, pipelines.root, env, step.data["timeout_in_minutes"]
        )
        if status:
            return status
    return 0


def run_commands(
    commands: list[str], root: Path, env: dict[str, str], minutes: float | None = None
) -> int:
    """Runs commands in one shell, up to the first that fails, as an agent does."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = "\n".join(commands).replace("$$", "$")
    process = subprocess.Popen(
        ["bash", "-e", "-c", script],
        cwd=root,
        env={**os.environ, "PATH": here, **env},
        start_new_session=True,
    )
    try:
        return process.wait(minutes and minutes * 60)
    except subprocess.TimeoutExpired:
        print(f"It took more than its {minutes} minutes.", file=sys.stderr)
        return 124
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Ends a shell and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        process.wait()


def require_device(step: Step) -> None:
    wanted = step.data.get("num_devices", 1)
    if step.device != CPU and num_gpus() < wanted:
        raise PipelineError(
            f"{step.label} needs {wanted} {step.device}, this machine has "
            f"{num_gpus()} NVIDIA GPUs: run it on such a machine"
        )


def num_gpus() -> int:
    if not shutil.which("nvidia-smi"):
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return done.stdout.count("GPU ")


def run_all(pipelines: Pipelines, flags: list[str]) -> int:
    """All CPU steps that are not optional, their tests by one pytest.

    One process shares engines between tests and spreads them evenly over the cores.
    """
    tests: list[str] = []
    for step in pipelines.steps:
        if not step.in_make_test:
            continue
        tests += step.tests
        others = [c for c in step.commands if not pytest_args(c)]
        if others:
            print(f"--- {step.label}", flush=True)
            status = run_commands(others, pipelines.root, {})
            if status:
                return status
    return run_pytest(sorted(tests), pipelines.root, flags)


def shard(paths: list[str], root: Path) -> int:
    """Runs this job's share of the test files below `paths`.

    Raises:
        PipelineError: there are fewer files than jobs.
    """
    job, count = int(os.environ.get(JOB, 0)), int(os.environ.get(JOB_COUNT, 1))
    files = share(test_files(paths, root), job, count)
    if not files:
        raise PipelineError(f"{' '.join(paths)}: fewer test files than {count} jobs")
    return run_pytest(files, root, [])


def share(files: list[str], job: int, count: int) -> list[str]:
    """Every `count`-th file, from `job` on: all jobs together have each file once."""
    return files[job::count]


def run_pytest(paths: list[str], root: Path, args: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", *args, *paths]
    return subprocess.run(command, cwd=root).returncode
