# SPDX-License-Identifier: Apache-2.0
"""Which steps a change needs."""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .documents import PipelineError
from .steps import Pipelines, Step


@dataclass
class Selection:
    """The steps to run, in the order of the areas, and why they are all of them."""

    steps: list[Step]
    all_because: str | None = None


def select(pipelines: Pipelines, changed: Iterable[str] | None) -> Selection:
    """The steps that some changed file concerns, and those that they wait for.

    All steps run for a file that `run_all_patterns` has or that no step knows, unless
    `run_all_exclude_patterns` has it.

    Args:
        pipelines: all areas.
        changed: paths from the repository's root; None takes all steps.
    """
    if changed is None:
        return Selection(list(pipelines.steps), "all were asked for")
    changed = list(changed)
    for path in changed:
        if reason := runs_all(pipelines, path):
            return Selection(list(pipelines.steps), reason)
    wanted = {
        step.key
        for step in pipelines.steps
        if any(step.depends_on_file(path) for path in changed)
    }
    waiting = list(wanted)
    while waiting:
        new = set(pipelines.by_key[waiting.pop()].depends_on) - wanted
        wanted |= new
        waiting += new
    return Selection([step for step in pipelines.steps if step.key in wanted])


def runs_all(pipelines: Pipelines, path: str) -> str | None:
    """Why a changed file concerns everything, or None."""
    if any(p.search(path) for p in pipelines.patterns("run_all_exclude_patterns")):
        return None
    if any(p.search(path) for p in pipelines.patterns("run_all_patterns")):
        return f"{path} concerns everything"
    knows = (
        step.depends_on_file(path)
        for step in pipelines.steps
        if "source_file_dependencies" in step.data
    )
    return None if any(knows) else f"no step knows {path}"


def changed_since(ref: str, root: Path) -> list[str]:
    """Files that differ from where this branch left `ref`, new and deleted ones too.

    Raises:
        PipelineError: git does not know `ref`.
    """
    commands = (
        ["git", "diff", "--name-only", "--no-renames", "--merge-base", ref],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise PipelineError(f"--since {ref}: {done.stderr.strip()}")
        found.update(done.stdout.splitlines())
    return sorted(found)
