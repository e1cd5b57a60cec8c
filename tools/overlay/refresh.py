# SPDX-License-Identifier: Apache-2.0
"""Turns changes made by hand in a composed tree into edit files.

The composed lines, each with where it is from, are compared with what stands in the
tree. Between two lines of the release that are still there, what is new goes to the
hunk that it touches, or is a hunk of its own.
"""

import ast
import shutil
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

from .base import ROOT
from .compose import changed_by_hand, edited, write_edited
from .edits import NOTE, SUFFIX, EditFile, Hunk, Section, parse, placed, tagged
from .members import IMPORTS, MODULE, Source
from .tree import Release

UNKNOWN = ["# Why: ?\n", "# Patch: ?\n", "# Until: ?\n"]
Line = tuple[str, int | Hunk | None]  # index in the release's file, hunk, or new
Gap = tuple[int, int, list[Line]]  # lines that are gone, from 0, and what is there


def refresh(release: Release, tree: Path, root: Path = ROOT) -> list[str]:
    """Writes an edit file for each file of the tree that was changed by hand.

    A new file becomes an addition. Files are composed again, so that what has another
    place, as imports have, stands there.

    Returns:
        Paths in the repository that were written, or removed.

    Raises:
        OverlayError: hunks of two sections would become one.
    """
    written = []
    for path in changed_by_hand(release, tree):
        if path in release.names:
            written.append(_refresh_edit(release, tree, path, root))
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(tree / path, root / path)
            (tree / path).symlink_to((root / path).resolve())
            written.append(path)
    return written


def _refresh_edit(release: Release, tree: Path, path: str, root: Path) -> str:
    file, source = root / f"{path}{SUFFIX}", release.source(path)
    edit = parse(path, file.read_text()) if file.exists() else EditFile(path, [])
    edit = refreshed(source, edit, (tree / path).read_text())
    if edit.sections:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(edit.text())
        write_edited(tree, {path: edited(release, edit)})
    else:
        file.unlink(missing_ok=True)
        write_edited(tree, {path: source.text})
    return str(file.relative_to(root))


def refreshed(source: Source, edit: EditFile, text: str) -> EditFile:
    """The edit file that composes to a text, with what still holds of it kept.

    Args:
        source: the release's file.
        edit: the edit file until now.
        text: of the composed file, changed by hand.
    """
    text = text.removesuffix(NOTE.format(path=source.path)).rstrip("\n") + "\n"
    lines = _aligned(list(tagged(source, edit.hunks())), Source("", text).lines)
    now: list[tuple[Hunk | None, Hunk]] = []  # what a hunk was, and what it is
    for gap in _gaps(lines, len(source.lines)):
        now += _hunks(source, edit, gap)
    after = {id(old): new for old, new in now if old is not None}
    sections = [
        Section(s.head, [after[id(h)] for h in s.hunks if id(h) in after])
        for s in edit.sections
    ]
    for old, new in now:
        if old is None:
            _put(source, sections, new)
    return EditFile(source.path, [s for s in sections if s.hunks])


def _aligned(before: list[Line], lines: list[str]) -> list[Line]:
    """The lines of a text, each with where it stood before."""
    texts = [text for text, _ in before]
    found: list[Line] = []
    blocks = SequenceMatcher(None, texts, lines, autojunk=False).get_matching_blocks()
    for block in blocks:
        found += [(line, None) for line in lines[len(found) : block.b]]
        found += before[block.a : block.a + block.size]
    return found


def _gaps(lines: list[Line], count: int) -> Iterator[Gap]:
    """What stands between lines of the release that follow one another."""
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
    """The hunks of a gap, each with the one that it was."""
    start, end, lines = gap
    known = [
        (a, b, hunk)
        for a, b, hunk in placed(source, edit.hunks())
        if start <= a and b <= end
    ]
    hunks = [hunk for _, _, hunk in known]
    if not known:
        yield from _new(source, start, end, [text for text, _ in lines])
    elif sum(b - a for a, b, _ in known) == end - start:
        bodies = _shared(lines, hunks)
        for a, b, hunk in known:
            if bodies[id(hunk)] or a < b:
                body = bodies[id(hunk)]
                yield hunk, Hunk(hunk.member, hunk.start, hunk.end, body)
    else:
        sections = [s for s in edit.sections if any(h in s.hunks for h in hunks)]
        if len(sections) > 1:
            raise hunks[0].error(
                source.path,
                "what was changed joins hunks of two sections, write it by hand",
            )
        new = list(_new(source, start, end, [text for text, _ in lines]))
        yield from ((hunks[0], hunk) for _, hunk in new)


def _shared(lines: list[Line], hunks: list[Hunk]) -> dict[int, list[str]]:
    """New lines belong to the hunk before them, or else to the one behind."""
    found: dict[int, list[str]] = {id(hunk): [] for hunk in hunks}
    owners = [owner for _, owner in lines if isinstance(owner, Hunk)]
    last = owners[0] if owners else hunks[0]
    for text, owner in lines:
        last = owner if isinstance(owner, Hunk) else last
        found[id(last)].append(text)
    return found


def _new(
    source: Source, start: int, end: int, lines: list[str]
) -> Iterator[tuple[None, Hunk]]:
    """A hunk that replaces lines of the release; none if they are what stood there."""
    while lines and start < end and lines[0] == source.lines[start]:
        lines, start = lines[1:], start + 1
    while lines and start < end and lines[-1] == source.lines[end - 1]:
        lines, end = lines[:-1], end - 1
    if not lines and start == end:
        return
    if start == end:
        start, lines = _settled(source, start, lines)
        end = start
        at_top = source.innermost(start, start) == MODULE
        is_import = start < source.last_import and _are_imports(lines)
        if at_top and (start == source.last_import or is_import):
            yield None, Hunk(IMPORTS, None, None, lines)
            return
    yield None, Hunk(*_anchor(source, start, end, _indent(lines)), lines)


def _indent(lines: list[str]) -> int:
    """Columns before the first line that has text."""
    filled = [line for line in lines if line.strip()]
    return len(filled[0]) - len(filled[0].lstrip()) if filled else 0


def _settled(source: Source, at: int, lines: list[str]) -> tuple[int, list[str]]:
    """Of the places where inserting means the same, the one that reads best.

    Lines that repeat around an insertion leave open which of them are new: best are
    blank lines or the least indented statement first, as git's indent heuristic has it.
    """
    first, body = at, lines
    while first > 0 and body[-1] == source.lines[first - 1]:
        first, body = first - 1, [body[-1], *body[:-1]]
    found = [(first, body)]
    while first < len(source.lines) and body[0] == source.lines[first]:
        first, body = first + 1, [*body[1:], body[0]]
        found.append((first, body))

    def cost(place: tuple[int, list[str]]) -> tuple[bool, int, int]:
        start = place[1][0]
        blank = -1 if not start.strip() else _indent([start])
        return start.strip()[:1] in [*")]}"], blank, abs(place[0] - at)

    return min(found, key=cost)


def _are_imports(lines: list[str]) -> bool:
    try:
        body = ast.parse("".join(lines)).body
    except SyntaxError:
        return False
    return bool(body) and all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in body)


def _anchor(
    source: Source, start: int, end: int, indent: int
) -> tuple[str, int | None, int | None]:
    """Member, and lines in it, for lines [start, end) of the file."""
    name = source.innermost(start + 1 if start < end else start, end)
    if start == end:
        above = [m for m in source.members.values() if m.last == start]
        around = [m.name for m in above if m.node.col_offset < indent]
        if start == len(source.lines) and not around:
            return MODULE, None, None
        if around:
            return around[0], None, None
        below = source.innermost(start + 1, start + 1)
        if above:
            name = above[0].name
        elif source.span(below)[0] == start + 1:
            name = below
    offset = source.span(name)[0] - 1
    return name, start - offset, end - offset


def _put(source: Source, sections: list[Section], hunk: Hunk) -> None:
    """Adds a new hunk beside the nearest of its member, or to a section of its own."""
    place = hunk.place(source)

    def distance(other: Hunk) -> int:
        return abs(other.place(source)[0] - place[0])

    known = [(h, s) for s in sections for h in s.hunks]
    near = [(h, s) for h, s in known if h.member == hunk.member]
    near = near or [(h, s) for h, s in known if s.head == UNKNOWN]
    if near:
        section = min(near, key=lambda pair: distance(pair[0]))[1]
    else:
        sections.append(section := Section(list(UNKNOWN)))
    later = [i for i, h in enumerate(section.hunks) if h.place(source) > place]
    section.hunks.insert(later[0] if later else len(section.hunks), hunk)
