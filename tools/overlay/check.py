# SPDX-License-Identifier: Apache-2.0
"""Checks that the overlay is what it says: additions, short edits, nothing copied."""

import ast
import tomllib
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, OverlayError
from .compose import edited
from .edits import LABELS, SPDX, SUFFIX, EditFile, Hunk
from .lock import problems as lock_problems
from .members import Source
from .repeats import repeat_problems, telling_lines
from .tree import PACKAGE, Release, additions, edit_files

MAX_LINES = 8  # of a hunk; what it calls stands in an addition


def check(wheel_path: Path, root: Path = ROOT) -> list[str]:
    """All that is wrong, one line each: `path:line: what, what to do`."""
    try:
        edits = edit_files(root)
    except OverlayError as error:
        return [str(error)]
    with ZipFile(wheel_path) as wheel:
        release, files = Release(wheel), additions(root)
        found = list(place_problems(files, release))
        for path in files:
            if path.endswith(".py"):
                found += text_problems(path, (root / path).read_text())
        for edit in edits:
            found += edit_problems(release, edit, patches(root))
        found += [
            f"{line}, review it and run `lock`" for line in lock_problems(release, root)
        ]
        return found + repeat_problems(wheel, root)


def patches(root: Path) -> set[str]:
    """Slugs of the series; `downstream` are edits that stay here."""
    series = root / "tools" / "upstream" / "series.toml"
    if not series.exists():
        return set()
    listed = tomllib.loads(series.read_text())["patch"]
    return {Path(patch["text"]).stem for patch in listed} | {"downstream"}


def module_path(path: str) -> str:
    """What a file is imported as: packages, modules and extensions alike."""
    stem = path.removesuffix("/__init__.py")
    folder, _, name = stem.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def place_problems(files: list[str], release: Release) -> Iterator[str]:
    upstream = {
        module_path(name): name
        for name in release.names
        if name.endswith((".py", ".so"))
    }
    for path in files:
        hidden = upstream.get(module_path(path), path)
        if path == f"{PACKAGE}/__init__.py":
            yield f"{path}:1: hides the installed package, remove it"
        elif path in release.names:
            yield f"{path}:1: vLLM has this file, change it by {path}{SUFFIX}"
        elif path.endswith(".py") and hidden != path:
            yield f"{path}:1: hides vLLM's {hidden}, give it another name"


def text_problems(path: str, text: str) -> Iterator[str]:
    if not text.strip() and path.endswith("/__init__.py"):
        return
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}, mend it"
        return
    if text.partition("\n")[0] != SPDX:
        yield f"{path}:1: has no licence line, start it with `{SPDX}`"
    if not ast.get_docstring(tree):
        yield f"{path}:1: has no docstring, say what the module is for"


def edit_problems(release: Release, edit: EditFile, known: set[str]) -> Iterator[str]:
    try:
        edited(release, edit)
    except OverlayError as error:
        yield str(error)
        return
    for section in edit.sections:
        line = section.hunks[0].line if section.hunks else 1
        where = f"{edit.path}{SUFFIX}:{line}"
        for label in LABELS:
            if section.say(label) in ("", "?"):
                yield f"{where}: its section does not say `# {label}: …`, write it"
        if known and section.patch not in known | {"", "?"}:
            yield f"{where}: series.toml has no patch {section.patch!r}"
    for hunk in edit.hunks():
        yield from hunk_problems(release.source(edit.path), hunk)


def hunk_problems(source: Source, hunk: Hunk) -> Iterator[str]:
    where = f"{source.path}{SUFFIX}:{hunk.line}"
    code = [line for line in hunk.lines if line.strip()[:1] not in ("", "#")]
    if len(code) > MAX_LINES:
        yield (
            f"{where}: the hunk has {len(code)} lines of code, move what it does to "
            f"an addition until there are at most {MAX_LINES}"
        )
    start, end = hunk.place(source)
    theirs = [key for _, key in telling_lines("".join(source.lines[start:end]))]
    ours = [key for _, key in telling_lines("".join(hunk.lines))]
    match = SequenceMatcher(None, theirs, ours, autojunk=False)
    if match.find_longest_match().size:
        yield f"{where}: the hunk repeats vLLM's lines, replace fewer of them"
