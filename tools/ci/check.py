# SPDX-License-Identifier: Apache-2.0
"""What a schema cannot say: names that exist, tests that run once, jobs that fit."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from .reads import reads
from .steps import SHARD, Pipelines, Step, test_files

# `buildkite-agent pipeline upload` fills in `$NAME` itself; `$$` leaves it to the job.
BARE_DOLLAR = re.compile(r"(?<![$\\])(\$\$)*\$(?!\$)")
DOLLAR = (
    "Buildkite fills in `$` when the pipeline is uploaded, write `$$` to leave it to "
    "the job"
)
QUEUE, KEY = ("steps", 0, "agents", "queue"), ("steps", 0, "key")


def check(pipelines: Pipelines) -> list[str]:
    """All that is wrong, one line each: `path:line: what, what to do`."""
    rules = (
        pattern_problems,
        first_problems,
        name_problems,
        order_problems,
        test_problems,
    )
    found = [problem for rule in rules for problem in rule(pipelines)]
    for step in pipelines.steps:
        for rule in (device_problems, path_problems, job_problems, read_problems):
            found += rule(step, pipelines)
        for rule in (dollar_problems, make_test_problems):
            found += rule(step)
    return sorted(found, key=place)


def place(problem: str) -> tuple[str, int]:
    path, line, _ = problem.split(":", 2)
    return path, int(line)


def pattern_problems(pipelines: Pipelines) -> Iterator[str]:
    for name in ("run_all_patterns", "run_all_exclude_patterns"):
        for at, text in enumerate(pipelines.config.data[name]):
            try:
                re.compile(text)
            except re.error as error:
                yield pipelines.config.problem(f"`{text}`: {error}", name, at)


def first_problems(pipelines: Pipelines) -> Iterator[str]:
    """The step that uploads the others has agents, and scripts that are there."""
    first, devices = pipelines.first, pipelines.config.data["devices"].values()
    (step,) = first.data["steps"]
    queues = [device["queue"] for device in devices]
    if step["agents"]["queue"] not in queues:
        yield first.problem(f"no such queue, use {', '.join(queues)}", *QUEUE)
    if step["key"] in pipelines.by_key:
        yield first.problem(f"another step has the key {step['key']}", *KEY)
    for at, command in enumerate(step["commands"]):
        where = ("steps", 0, "commands", at)
        script = pipelines.root / command.split()[0]
        if not os.access(script, os.X_OK) or not script.is_file():
            yield first.problem(f"{command}: no script that can be run", *where)
        if BARE_DOLLAR.search(command):
            yield first.problem(DOLLAR, *where)


def name_problems(pipelines: Pipelines) -> Iterator[str]:
    for name in ("label", "key"):
        known: dict[str, Step] = {}
        for step in pipelines.steps:
            first = known.setdefault(step.data[name], step)
            if first is not step:
                where = f"{first.area.name}:{first.area.line(('steps', first.at))}"
                yield step.problem(f"{where} has this {name} too, choose another", name)


def order_problems(pipelines: Pipelines) -> Iterator[str]:
    for step in pipelines.steps:
        for key in step.depends_on:
            other = pipelines.by_key.get(key)
            if other is None:
                yield step.problem(f"depends on `{key}`, which no step has as its key")
            elif other.optional and not step.optional:
                yield step.problem(
                    f"depends on `{key}`, which is optional, make both optional or none"
                )
            elif reaches(pipelines, other, step.key):
                yield step.problem(f"depends on `{key}`, which waits for this step")


def reaches(pipelines: Pipelines, start: Step, key: str) -> bool:
    seen: set[str] = set()
    waiting = [start.key]
    while waiting:
        name = waiting.pop()
        if name == key:
            return True
        if name not in seen and (step := pipelines.by_key.get(name)):
            waiting += step.depends_on
        seen.add(name)
    return False


def test_problems(pipelines: Pipelines) -> Iterator[str]:
    """Each test file runs in one step of those that `make test` consists of."""
    steps = [step for step in pipelines.steps if step.in_make_test]
    for path in sorted((pipelines.root / "tests").rglob("test_*.py")):
        name = path.relative_to(pipelines.root).as_posix()
        running = [step for step in steps if step.runs_test(name)]
        if not running:
            yield (
                f"{name}:1: no CPU step runs it, name its folder in an area of "
                f"{pipelines.config.data['job_dirs'][0]}"
            )
        for step in running[1:]:
            yield step.problem(f"runs {name}, as {running[0].label} does, take it out")


def device_problems(step: Step, pipelines: Pipelines) -> Iterator[str]:
    devices = pipelines.config.data["devices"]
    if step.device not in devices:
        known = ", ".join(devices)
        yield step.problem(f"unknown device `{step.device}`, use {known}", "device")
        return
    counts = devices[step.device]["num_devices"]
    if step.data.get("num_devices", 1) not in counts:
        yield step.problem(
            f"{step.device} comes as {', '.join(map(str, counts))}", "num_devices"
        )


def path_problems(step: Step, pipelines: Pipelines) -> Iterator[str]:
    named = step.data.get("source_file_dependencies", [])
    for at, name in enumerate(named):
        path = pipelines.root / name.removeprefix("!")
        where = ("source_file_dependencies", at)
        if not path.exists():
            yield step.problem(f"there is no {name.removeprefix('!')}", *where)
        elif path.is_dir() != name.endswith("/"):
            yield step.problem(f"{name}: a folder ends with /, a file without", *where)
    for at, command in enumerate(step.commands):
        for test in step.tests:
            if test in command and not (pipelines.root / test).exists():
                yield step.problem(f"there is no {test}", "commands", at)
    for name, times in Counter(named).items():
        if times > 1:
            yield step.problem(f"{name} is there twice", "source_file_dependencies")


def read_problems(step: Step, pipelines: Pipelines) -> Iterator[str]:
    """A change of what a test of the step reads has to run the step."""
    if any(pattern_problems(pipelines)):
        return
    everything = pipelines.patterns("run_all_patterns")
    for test in step.tests:
        place = pipelines.root / test
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in filter(Path.is_file, files):
            for read in sorted(reads(file, pipelines.root)):
                known = any(pattern.search(read) for pattern in everything)
                if not known and not step.depends_on_file(read):
                    name = file.relative_to(pipelines.root).as_posix()
                    yield step.problem(
                        f"{name} reads {read}, name it", "source_file_dependencies"
                    )


def dollar_problems(step: Step) -> Iterator[str]:
    for at, command in enumerate(step.commands):
        if BARE_DOLLAR.search(command):
            yield step.problem(
                DOLLAR,
                *("commands", at),
            )


def job_problems(step: Step, pipelines: Pipelines) -> Iterator[str]:
    text = " ".join(step.commands)
    shards = " ".join(SHARD) in text
    if step.jobs == 1:
        if shards or "%N" in step.label:
            yield step.problem("has %N or a shard, give it parallelism")
        return
    if "%N" not in step.label:
        yield step.problem("has parallelism, put %N into its label", "label")
    num_files = len(test_files(step.tests, pipelines.root))
    if shards and num_files < step.jobs:
        yield step.problem(
            f"{step.jobs} jobs for {num_files} test files", "parallelism"
        )
    elif not shards and "BUILDKITE_PARALLEL_JOB" not in text:
        yield step.problem(
            "all its jobs do the same, use `python -m tools.ci shard PATH`", "commands"
        )


def make_test_problems(step: Step) -> Iterator[str]:
    """`make test` runs all pytests of these steps in one process."""
    if not step.in_make_test:
        return
    if step.pytests and "env" in step.data:
        yield step.problem("`make test` has one environment, set none here", "env")
    for args in step.pytests:
        for flag in (arg for arg in args if arg.startswith("-")):
            yield step.problem(
                f"{flag}: `make test` has one pytest, put flags into pyproject.toml",
                "commands",
            )
