# SPDX-License-Identifier: Apache-2.0
"""Checks the overlay: additions, short edits, nothing copied from vLLM."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, OverlayError
from .compose import edited
from .edits import LABELS, SUFFIX, EditFile, Hunk, error
from .lock import NAME, lock_problems, read_lock, to_lock
from .members import Source
from .repeats import repeats, telling_lines
from .tree import Release, additions, edit_files

MAX_LINES = 8  # per hunk; longer code belongs in an addition


def check(wheel_path: Path, root: Path = ROOT) -> list[str]:
    """All problems, one line each: `path:line: what, what to do`."""
    with ZipFile(wheel_path) as wheel:
        try:
            return list(problems(Release(wheel), root))
        except OverlayError as problem:  # a file that cannot be read
            return [str(problem)]


def problems(release: Release, root: Path) -> Iterator[str]:
    files, edits = additions(root), edit_files(root)
    yield from place_problems(files, release)
    for edit in edits:
        yield from edit_problems(release, edit, patches(root))
    for line in lock_problems(release, root):
        yield f"{line}, review it and run `lock`"
    if read_lock(root).keys() != to_lock(release, root):
        yield f"{NAME}:1: is not of these files, run `lock`"
    yield from repeats(root, edits, release)


def patches(root: Path) -> set[str]:
    """Slugs of the series, and `downstream` for edits that are not for upstream."""
    text = (root / "tools/upstream/series.toml").read_text()
    return {Path(p["text"]).stem for p in tomllib.loads(text)["patch"]} | {"downstream"}


def module_path(path: str) -> str:
    """The import path of a file, for packages, modules and extension modules."""
    stem = path.removesuffix("/__init__.py")
    folder, _, name = stem.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def place_problems(files: list[str], release: Release) -> Iterator[str]:
    modules = (name for name in release.names if name.endswith((".py", ".so")))
    theirs = {module_path(name): name for name in modules}
    for path in files:
        hidden = theirs.get(module_path(path), path)
        if path in release.names:
            yield f"{path}:1: vLLM has this file, change it by {path}{SUFFIX}"
        elif path.endswith(".py") and hidden != path:
            yield f"{path}:1: hides vLLM's {hidden}, give it another name"


def edit_problems(release: Release, edit: EditFile, known: set[str]) -> Iterator[str]:
    try:
        edited(release, edit)
    except OverlayError as problem:
        yield str(problem)
        return
    for section in edit.sections:
        number = section.hunks[0].number if section.hunks else 1
        for label in LABELS:
            if section.says(label) in ("", "?"):
                what = f"its section does not say `# {label}: …`, write it"
                yield str(error(edit.path, number, what))
        if (slug := section.says("Patch")) not in known | {"", "?"}:
            yield str(error(edit.path, number, f"series.toml has no patch {slug!r}"))
    for hunk in edit.hunks():
        yield from hunk_problems(release.source(edit.path), hunk)


def hunk_problems(source: Source, hunk: Hunk) -> Iterator[str]:
    text = re.sub(r'(?s)""".*?"""', "", "".join(hunk.lines))  # docstrings of new fields
    code = [line for line in text.splitlines() if line.strip()[:1] not in ("", "#")]
    if len(code) > MAX_LINES:
        what = f"has {len(code)} lines, move what it does to an addition"
        yield str(hunk.error(source.path, what))
    start, end = hunk.place(source)
    sides = ("".join(source.lines[start:end]), "".join(hunk.lines))
    theirs, ours = ({key for _, key in telling_lines(side)} for side in sides)
    if theirs & ours:
        what = "repeats a line of vLLM's, replace fewer lines"
        yield str(hunk.error(source.path, what))
