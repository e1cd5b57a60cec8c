# SPDX-License-Identifier: Apache-2.0
"""The steps that `.buildkite/` names, and what they depend on."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from .documents import Document, PipelineError, read

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ".buildkite/ci_config.yaml"
FIRST = ".buildkite/pipeline.yaml"
CPU = "cpu"
SHARD = ["python", "-m", "tools.ci", "shard"]


@dataclass
class Step:
    """One step of an area; the names are those of the YAML."""

    area: Document
    at: int  # index among the area's steps
    data: dict[str, Any]

    @property
    def label(self) -> str:
        return self.data["label"]

    @property
    def key(self) -> str:
        return self.data["key"]

    @property
    def device(self) -> str:
        return self.data["device"]

    @property
    def group(self) -> str:
        return self.area.data["group"]

    @property
    def commands(self) -> list[str]:
        return self.data["commands"]

    @property
    def jobs(self) -> int:
        return self.data.get("parallelism", 1)

    @property
    def optional(self) -> bool:
        """Runs at night and when someone asks for it, not with every change."""
        return self.data.get("optional", False)

    @property
    def depends_on(self) -> list[str]:
        return self.data.get("depends_on", self.area.data.get("depends_on", []))

    @property
    def in_make_test(self) -> bool:
        return self.device == CPU and not self.optional

    @cached_property
    def pytests(self) -> list[list[str]]:
        """Arguments of each pytest that the step runs."""
        return [args for command in self.commands if (args := pytest_args(command))]

    @cached_property
    def tests(self) -> list[str]:
        """The test folders and files that it runs."""
        return [a for args in self.pytests for a in args if not a.startswith("-")]

    def problem(self, what: str, *where: str | int) -> str:
        return self.area.problem(f"{self.label}: {what}", "steps", self.at, *where)

    def runs_test(self, path: str) -> bool:
        return any(covers(test, path) for test in self.tests)

    def depends_on_file(self, path: str) -> bool:
        """Its area, its tests and its `source_file_dependencies`, none: any file."""
        if "source_file_dependencies" not in self.data:
            return True
        named = self.data["source_file_dependencies"]
        if any(covers(name[1:], path) for name in named if name.startswith("!")):
            return False
        claims = [self.area.name, *self.tests, *named]
        return any(covers(name, path) for name in claims)


def covers(name: str, path: str) -> bool:
    """Whether `name`, a file or a folder, is or holds the file `path`."""
    return path == name or path.startswith(name.rstrip("/") + "/")


def pytest_args(command: str) -> list[str]:
    words = shlex.split(command.replace("$$", ""), comments=True)
    for program in (["pytest"], SHARD):
        if words[: len(program)] == program:
            return words[len(program) :]
    return []


def test_files(paths: Iterable[str], root: Path) -> list[str]:
    """The test files among and below `paths`."""
    found: set[Path] = set()
    for path in paths:
        whole = root / path
        found.update(whole.rglob("test_*.py") if whole.is_dir() else [whole])
    return [path.relative_to(root).as_posix() for path in sorted(found)]


@dataclass
class Pipelines:
    """All areas of a repository, what they share, and the step that uploads them."""

    root: Path
    config: Document
    first: Document
    areas: list[Document]

    @cached_property
    def steps(self) -> list[Step]:
        return [
            Step(area, at, data)
            for area in self.areas
            for at, data in enumerate(area.data["steps"])
        ]

    @cached_property
    def by_key(self) -> dict[str, Step]:
        return {step.key: step for step in self.steps}

    def patterns(self, name: str) -> list[re.Pattern]:
        return [re.compile(text) for text in self.config.data[name]]


def load(root: Path = ROOT) -> Pipelines:
    """Reads the config, the first step and the areas.

    Raises:
        PipelineError: one line for each way in which a file is not what it should be.
    """
    config = read(root / CONFIG, root, "config")
    first, areas, problems = None, [], []
    try:
        first = read(root / FIRST, root, "first")
    except PipelineError as error:
        problems += error.problems
    for at, folder in enumerate(config.data["job_dirs"]):
        files = sorted((root / folder).glob("*.yaml"))
        if not files:
            problems.append(
                config.problem(f"there is no *.yaml in {folder}", "job_dirs", at)
            )
        for path in files:
            try:
                areas.append(read(path, root, "area"))
            except PipelineError as error:
                problems += error.problems
    if problems:
        raise PipelineError(*problems)
    return Pipelines(root, config, first, areas)
