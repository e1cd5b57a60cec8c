# SPDX-License-Identifier: Apache-2.0
"""Reports what another release changes for this overlay, member by member."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import SequenceMatcher, unified_diff
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, Base, OverlayError
from .compose import compose, edited, name_vllm
from .edits import SUFFIX, EditFile, Hunk
from .guesses import guesses, hint
from .lock import Key, read_lock
from .members import Source
from .tree import Release, additions, edit_files

TIMEOUT = 600  # seconds
IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as reason:
        error = f"{type(reason).__name__}: {reason}"
    print(json.dumps([name, error]), flush=True)
"""


def rebase(
    old_wheel: Path,
    new_wheel: Path,
    root: Path = ROOT,
    write: bool = False,
    kernels: Base | None = None,
) -> str:
    """A report in Markdown; what it does not name needs no review.

    Args:
        old_wheel: the release that the overlay was written for.
        new_wheel: the other release.
        write: update the edit files to the line numbers of the other release.
        kernels: the wheel with a CPU's kernels, if it is another one.
    """
    with ZipFile(old_wheel) as before, ZipFile(new_wheel) as after:
        old, new = Release(before), Release(after)
        moved, misplaced = moved_edits(old, new, edit_files(root))
        if write:
            for edit in moved:
                (root / f"{edit.path}{SUFFIX}").write_text(edit.text())
        failed = import_problems(new_wheel, moved, root, kernels)
        sections = {
            "Members that changed": list(member_changes(old, new, read_lock(root))),
            "Hunks to place by hand": misplaced,
            "Modules to mend": [with_hint(new, problem) for problem in failed],
            "Guesses to look at": list(guesses(old, new, root)),
            "Requirements changed": list(requirement_changes(old, new)),
        }
    parts = [f"# {old_wheel.name} to {new_wheel.name}"]
    for title, found in sections.items():
        parts += [f"\n## {title}: {len(found)}\n", *found]
    counts = (f"{len(found)} {title.lower()}" for title, found in sections.items())
    return "\n".join([*parts, f"\n{', '.join(counts)}."]) + "\n"


def with_hint(new: Release, problem: str) -> str:
    """A problem of an import, with the place where the new release has the name."""
    name = re.search(r"cannot import name '(\w+)'|No module named '([\w.]+)'", problem)
    return problem + (hint(new, name[1] or name[2]) if name else "")


def member_changes(old: Release, new: Release, keys: dict[Key, str]) -> Iterator[str]:
    for path, name in sorted(keys):
        was, now = (side.source(path).own_lines(name) for side in (old, new))
        if was != now:
            diff = "".join([*unified_diff(was, now, n=3)][2:])
            is_there = new.source(path).span(name)
            gone = "" if is_there else f" is gone{hint(new, name)}"
            yield f"### `{path}`, `{name}`{gone}\n\n```diff\n{diff}```\n"


def moved_edits(
    old: Release, new: Release, edits: list[EditFile]
) -> tuple[list[EditFile], list[str]]:
    """The edits with their lines in another release, and hunks that do not fit it."""
    found, problems = [], []
    for edit in edits:
        there = EditFile(edit.path, [])
        for section in edit.sections:
            kept = []
            for hunk in section.hunks:
                try:
                    kept.append(
                        moved(old.source(edit.path), new.source(edit.path), hunk)
                    )
                except OverlayError as problem:
                    problems.append(f"- {problem}")
            there.sections.append(replace(section, hunks=kept))
        try:
            edited(new, there)
            found.append(there)
        except OverlayError as problem:
            problems.append(f"- {problem}")
    return found, problems


def moved(old: Source, new: Source, hunk: Hunk) -> Hunk:
    """A hunk with the line numbers of the other release's member.

    Raises:
        OverlayError: the member, or the lines at the hunk, are gone.
    """
    if hunk.start is None or new.span(hunk.member) is None:
        hunk.place(new)  # raises if the member is gone
        return hunk
    spans = ((side, *side.span(hunk.member)) for side in (old, new))
    members = [side.lines[first - 1 : last] for side, first, last in spans]
    matcher = SequenceMatcher(None, *members, autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        if size and a <= hunk.start and hunk.end <= a + size:
            return replace(hunk, start=hunk.start + b - a, end=hunk.end + b - a)
    raise hunk.error(new.path, "the lines that it stands at are gone")


def import_problems(
    wheel: Path, edits: list[EditFile], root: Path, kernels: Base | None
) -> list[str]:
    """Modules that cannot be imported with the overlay on top of a release."""
    names = module_names([*additions(root), *(edit.path for edit in edits)])
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        parts = {"edits": edits, "kernels": kernels, "root": root}
        compose(wheel, tree, allow_changed=True, **parts)
        # On the CPU platform importing needs no GPU.
        name_vllm(tree / "info", f"{wheel.name.split('-')[1]}+cpu")
        errors = import_errors(names, tree)
    lines = (f"- `{name}`: {error}" for name, error in errors.items())
    return [line.replace(f"{tree}/", "") for line in lines]


def module_names(paths: Iterable[str]) -> list[str]:
    files = (path.removesuffix(".py") for path in paths if path.endswith(".py"))
    return [file.removesuffix("/__init__").replace("/", ".") for file in files]


def import_errors(
    modules: list[str], tree: Path | None = None, **variables: str
) -> dict[str, str]:
    """Imports modules one after the other in a subprocess; returns errors by module.

    Args:
        tree: folder to import from; None uses what is installed.
        variables: additional environment variables.
    """
    environment = os.environ | variables | ({"PYTHONPATH": str(tree)} if tree else {})
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, *modules],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=TIMEOUT,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    found = dict.fromkeys(modules, "not reached: Python died at the first of these")
    found |= map(json.loads, lines)
    return {name: error for name, error in found.items() if error}


def requirement_changes(old: Release, new: Release) -> Iterator[str]:
    """Differences in requirements and entry points of the releases' metadata."""
    sides = []
    for side in (old, new):
        headers = message_from_string(side.info("METADATA"))
        names = ("Requires-Python", "Requires-Dist")
        lines = {f"{n}: {v}" for n in names for v in headers.get_all(n, [])}
        sides.append(lines | set(side.info("entry_points.txt").splitlines()))
    yield from (f"- gone: `{line}`" for line in sorted(sides[0] - sides[1]))
    yield from (f"- new: `{line}`" for line in sorted(sides[1] - sides[0]))
