# SPDX-License-Identifier: Apache-2.0
"""Reports what another release changes for this overlay, member by member."""

import re
from collections.abc import Iterator
from dataclasses import replace
from difflib import SequenceMatcher, unified_diff
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, OverlayError
from .compose import edited
from .edits import SUFFIX, EditFile, Hunk
from .lock import read_lock
from .members import Source
from .relied import Reader
from .tree import Release, edit_files


def rebase(
    old_wheel: Path, new_wheel: Path, root: Path = ROOT, write: bool = False
) -> str:
    """A report in Markdown; what it does not name needs no review.

    Args:
        old_wheel: the release that the overlay was written for.
        new_wheel: the other release.
        write: update the edit files to the line numbers of the other release.
    """
    with ZipFile(old_wheel) as before, ZipFile(new_wheel) as after:
        old, new = Release(before), Release(after)
        moved, misplaced = moved_edits(old, new, edit_files(root))
        if write:
            for edit in moved:
                (root / f"{edit.path}{SUFFIX}").write_text(edit.text())
        sections = {
            "Members that changed": list(member_changes(old, new, root)),
            "Hunks to place by hand": misplaced,
            "Requirements changed": list(requirement_changes(old_wheel, new_wheel)),
        }
    parts = [f"# {old_wheel.name} to {new_wheel.name}"]
    for title, found in sections.items():
        parts += [f"\n## {title}: {len(found)}\n", *found]
    counts = (f"{len(found)} {title.lower()}" for title, found in sections.items())
    return "\n".join([*parts, f"\n{', '.join(counts)}."]) + "\n"


def member_changes(old: Release, new: Release, root: Path) -> Iterator[str]:
    """Diffs of members that our lines were written for, and new ones with a name that
    we use: a property in place of an attribute that we set, a field that we add."""
    for path, name in sorted(read_lock(root).keys() | Reader(new, root).relied_on()):
        was, now = (side.source(path).own_lines(name) for side in (old, new))
        if was != now:
            diff = "".join([*unified_diff(was, now, n=3)][2:])
            what = "" if was else " is new"
            if not new.source(path).span(name):
                what = f" is gone{hint(new, name)}"
            yield f"### `{path}`, `{name}`{what}\n\n```diff\n{diff}```\n"


def hint(new: Release, name: str) -> str:
    """Where the new release defines what a dotted name ends with, as far as it does."""
    word = name.rpartition(".")[2]
    found = [p for p in sorted(new.names) if p.endswith(f"/{word}.py")]
    defined = re.compile(rf"^(?:def|class) {word}\b|^{word}\b\s*[:=]", re.M)
    found += [p for p in new.modules() if defined.search(new.source(p).text)]
    return f", now in {', '.join(f'`{p}`' for p in found[:3])}" if found else ""


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


def requirement_changes(old_wheel: Path, new_wheel: Path) -> Iterator[str]:
    """Differences in requirements and entry points of the releases' metadata."""
    sides = []
    for wheel in (old_wheel, new_wheel):
        (release,) = distributions(path=[str(wheel)])
        names = ("Requires-Python", "Requires-Dist")
        lines = {f"{n}: {v}" for n in names for v in release.metadata.get_all(n, [])}
        points = {f"{each.name} = {each.value}" for each in release.entry_points}
        sides.append(lines | points)
    yield from (f"- gone: `{line}`" for line in sorted(sides[0] - sides[1]))
    yield from (f"- new: `{line}`" for line in sorted(sides[1] - sides[0]))
