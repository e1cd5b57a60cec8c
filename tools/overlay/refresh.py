# SPDX-License-Identifier: Apache-2.0
"""Turns manual changes in a composed tree into edit files.

The composed lines, each with its origin, are compared with the file in the tree. New
lines between two remaining lines of the release become part of the hunk that is there
already, or a new hunk.
"""

import ast
import shutil
from collections import defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path

from .base import ROOT
from .compose import STAMP, changed_by_hand, edited
from .edits import NOTE, SUFFIX, EditFile, Hunk, Section, parse, placed, tagged
from .members import IMPORTS, MODULE, Source
from .tree import Release

UNKNOWN = ["# Why: ?\n", "# Patch: ?\n", "# Until: ?\n"]
Line = tuple[str, int | Hunk | None]  # with its index in the release, its hunk, or new
Gap = tuple[int, int, list[Line]]  # removed lines of the release, what replaces them


def refresh(release: Release, tree: Path, root: Path = ROOT) -> list[str]:
    """Writes an edit file for each file of the tree that was changed manually.

    A new file becomes an addition. An edited file is composed again, since this may
    move lines such as imports.

    Returns:
        Paths in the repository that were written or removed.
    """
    written = []
    for path in changed_by_hand(tree):
        file = root / (f"{path}{SUFFIX}" if path in release.names else path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if path in release.names:
            _write(release, tree, path, file)
        else:
            shutil.move(tree / path, file)
            (tree / path).symlink_to(file.resolve())
        written.append(str(file.relative_to(root)))
    (tree / STAMP).touch()
    return written


def _write(release: Release, tree: Path, path: str, file: Path) -> None:
    source, known = release.source(path), file.read_text() if file.exists() else ""
    edit = refreshed(source, parse(path, known), (tree / path).read_text())
    if edit.sections:
        file.write_text(edit.text())
        (tree / path).write_text(edited(release, edit))
    else:
        file.unlink(missing_ok=True)
        (tree / path).write_text(source.text)


def refreshed(source: Source, edit: EditFile, text: str) -> EditFile:
    """The edit file that composes to `text`, with its sections kept if possible. Tells
    of each new hunk in an existing section, whose reason may not apply to it.

    Args:
        source: the release's file.
        edit: the current edit file.
        text: the composed file with manual changes.
    """
    text = text.removesuffix(NOTE.format(path=source.path))
    before = list(tagged(source, edit.hunks()))
    pairs: list[tuple[Hunk | None, Hunk]] = []  # old hunk, new hunk
    for gap in _gaps(_aligned(before, Source("", text).lines), len(source.lines)):
        pairs += _hunks(source, edit, gap)
    now = {id(old): new for old, new in pairs}
    sections = [
        Section(s.head, [now[id(h)] for h in s.hunks if id(h) in now])
        for s in edit.sections
    ]
    for hunk in (new for old, new in pairs if old is None):
        section = _put(source, sections, hunk)
        if section.head != UNKNOWN:
            at, why = hunk.place(source)[0] + 1, "".join(section.head).strip()
            print(f"{source.path}:{at} is new below this reason, or move it:\n{why}")
    return EditFile(source.path, [s for s in sections if s.hunks])


def _aligned(before: list[Line], lines: list[str]) -> Iterator[Line]:
    """The lines of a text, each with its origin if it was there before."""
    texts, at = [text for text, _ in before], 0
    matcher = SequenceMatcher(None, texts, lines, autojunk=False)
    for start, there, size in matcher.get_matching_blocks():
        yield from ((line, None) for line in lines[at:there])
        yield from before[start : start + size]
        at = there + size


def _gaps(lines: Iterator[Line], count: int) -> Iterator[Gap]:
    """Changes between remaining lines of the release."""
    at, between = 0, list[Line]()
    for line in [*lines, ("", count)]:
        index = line[1]
        if not isinstance(index, int):
            between.append(line)
            continue
        if between or index > at:
            yield at, index, between
        at, between = index + 1, []


def _hunks(
    source: Source, edit: EditFile, gap: Gap
) -> Iterator[tuple[Hunk | None, Hunk]]:
    """The hunks of a gap, each with the old hunk that it replaces. New and removed
    lines belong to the old hunk before them, or else to the first one."""
    start, end, lines = gap
    places = placed(source, edit.hunks())
    known = [place for place in places if start <= place[0] and place[1] <= end]
    known = known or [(start, end, None)]
    owner, bodies = known[0][2], defaultdict(list)
    for line, origin in lines:
        owner = origin if isinstance(origin, Hunk) else owner
        bodies[id(owner)].append(line)
    bounds = [start, *(a for a, _, _ in known[1:]), end]
    for (a, b, hunk), span in zip(known, pairwise(bounds), strict=True):
        body = bodies[id(hunk)]
        if hunk is None or (a, b) != span:
            yield from ((hunk, new) for new in _new(source, *span, body))
        elif body != source.lines[a:b]:  # else it was reverted
            yield hunk, Hunk(hunk.member, hunk.start, hunk.end, body)


def _new(source: Source, start: int, end: int, lines: list[str]) -> Iterator[Hunk]:
    """A hunk that replaces lines of the release; none if they are unchanged."""
    while lines and start < end and lines[0] == source.lines[start]:
        lines, start = lines[1:], start + 1
    while lines and start < end and lines[-1] == source.lines[end - 1]:
        lines, end = lines[:-1], end - 1
    if start < end:
        yield Hunk(*_anchor(source, start, end), lines)
    elif lines:
        start, lines = _settled(source, start, lines)
        at_top = source.innermost(start, start) == MODULE
        is_import = start < source.last_import and _are_imports(lines)
        if at_top and (start == source.last_import or is_import):
            yield Hunk(IMPORTS, None, None, lines)
        else:
            yield Hunk(*_anchor(source, start, start, _indent(lines)), lines)


def _indent(lines: list[str]) -> int:
    """Indentation of the first line that is not blank."""
    return next((len(ln) - len(ln.lstrip()) for ln in lines if ln.strip()), 0)


def _settled(source: Source, at: int, lines: list[str]) -> tuple[int, list[str]]:
    """Of equivalent places to insert lines, the one that reads best.

    If inserted lines repeat adjacent ones, it is ambiguous which are new. As in git's
    indent heuristic, a blank line comes first, or else the least indented line.
    """
    first, body = at, lines
    while first > 0 and body[-1] == source.lines[first - 1]:
        first, body = first - 1, [body[-1], *body[:-1]]
    places = [(first, body)]
    while first < len(source.lines) and body[0] == source.lines[first]:
        first, body = first + 1, [*body[1:], body[0]]
        places.append((first, body))

    def cost(place: tuple[int, list[str]]) -> tuple[bool, int, int]:
        top = place[1][0]
        indent = _indent([top]) if top.strip() else -1
        return top.strip().startswith((")", "]", "}")), indent, abs(place[0] - at)

    return min(places, key=cost)


def _are_imports(lines: list[str]) -> bool:
    try:
        body = ast.parse("".join(lines)).body
    except SyntaxError:
        return False
    return bool(body) and all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)


def _anchor(
    source: Source, start: int, end: int, indent: int = 0
) -> tuple[str, int | None, int | None]:
    """The member of the 0-based lines [start, end) of the file, and lines in it.

    Args:
        indent: of inserted lines: after a member's last line they belong to the member
            if they are indented more than it.
    """
    name = source.innermost(start + (start < end), end)  # or the line above
    if start == end:
        above = [m for m in source.members.values() if m.last == start]
        around = [m.name for m in above if m.node.col_offset < indent]
        below = source.innermost(start + 1, start + 1)
        if around or start == len(source.lines):
            return (*around, MODULE)[0], None, None
        if above:
            name = above[0].name
        elif source.span(below)[0] == start + 1:
            name = below
    offset = source.span(name)[0] - 1
    return name, start - offset, end - offset


def _put(source: Source, sections: list[Section], hunk: Hunk) -> Section:
    """Adds a new hunk to a section with its member, else to one without a reason."""
    near = [s for s in sections if hunk.member in {h.member for h in s.hunks}]
    near += [s for s in sections if s.head == UNKNOWN]
    if not near:
        near = [Section(list(UNKNOWN))]
        sections += near
    near[0].hunks.append(hunk)
    near[0].hunks.sort(key=lambda h: h.place(source))
    return near[0]
