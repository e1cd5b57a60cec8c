# SPDX-License-Identifier: Apache-2.0
"""Edit files: `vllm/a.py.edit` holds our lines in the release's `vllm/a.py`.

A file is sections; a section says in comments why it is there, to which patch of the
series it belongs and until when, and has hunks. A hunk is a line that says where, and
our lines as they stand in the composed file:

    # Why: nothing tells how long drafting takes.
    # Patch: metrics
    # Until: upstream times drafting.
    @@ GPUModelRunner.sample_tokens, after line 38
            self.step_clock.sampled()

Lines count from the first of the member, decorators included, in the pinned file:
never in a composed one. docs/contributing.md has all that can stand after `@@`.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .base import OverlayError
from .members import IMPORTS, Source

SUFFIX = ".edit"
SPDX = "# SPDX-License-Identifier: Apache-2.0"
LABELS = ("Why", "Patch", "Until")
HEADER = re.compile(
    rf"@@ (?:{IMPORTS}|(?P<member>[\w.\[\]]+), (?:(?P<end>at the end)|"
    r"(?P<top>before line 1)|after line (?P<after>[1-9]\d*)|"
    r"(?:replac|remov)ing lines? (?P<first>[1-9]\d*)(?: to (?P<last>\d+))?))"
)
FORMS = (
    "'@@ <member>, after line N', '…, before line 1', '…, replacing line N', "
    "'…, replacing lines N to M', '…, removing line N', '…, at the end', '@@ imports'"
)
NOTE = (
    "# Modified by AnyDraft: vLLM's file with the lines of {path}.edit in it "
    "(Apache-2.0, 4b).\n"
)


@dataclass
class Hunk:
    """Our lines, and the lines [start, end) of a member, from 0, that they replace.

    Attributes:
        start: None is behind the member's last line.
        line: of the header in its edit file, for messages.
    """

    member: str
    start: int | None
    end: int | None
    lines: list[str]
    line: int = 0

    @property
    def header(self) -> str:
        if self.member == IMPORTS:
            return f"@@ {IMPORTS}"
        if self.start is None:
            return f"@@ {self.member}, at the end"
        if self.end == 0:
            return f"@@ {self.member}, before line 1"
        if self.start == self.end:
            return f"@@ {self.member}, after line {self.start}"
        verb = "replacing" if self.lines else "removing"
        if self.end == self.start + 1:
            return f"@@ {self.member}, {verb} line {self.end}"
        return f"@@ {self.member}, {verb} lines {self.start + 1} to {self.end}"

    def place(self, source: Source) -> tuple[int, int]:
        """The lines of the file, from 0, that it replaces.

        Raises:
            OverlayError: the member, or a line of it, is not there.
        """
        if self.member == IMPORTS:
            return source.last_import, source.last_import
        span = source.span(self.member)
        if span is None:
            raise self.error(source.path, f"the release has no {self.member} here")
        first, last = span[0] - 1, span[1]
        if self.start is None:
            return last, last
        if first + self.end > last:
            count = last - first
            raise self.error(source.path, f"{self.member} has {count} lines only")
        return first + self.start, first + self.end

    def error(self, path: str, what: str) -> OverlayError:
        return OverlayError(f"{path}{SUFFIX}:{self.line}: {what}: {self.header}")


@dataclass
class Section:
    """Hunks of one purpose, and the comment lines that say which."""

    head: list[str]
    hunks: list[Hunk] = field(default_factory=list)

    def say(self, label: str) -> str:
        """What the comment says under a label; empty if it is not there."""
        found, is_on = [], False
        for line in self.head:
            text = line.removeprefix("#").strip()
            name, colon, rest = text.partition(":")
            if colon and name in LABELS:
                is_on, text = name == label, rest.strip()
            found += [text] if is_on else []
        return " ".join(found).strip()

    @property
    def patch(self) -> str:
        return self.say("Patch")


@dataclass
class EditFile:
    """`path` is the release's file, without `.edit`."""

    path: str
    sections: list[Section]

    def hunks(self, patches: Iterable[str] | None = None) -> list[Hunk]:
        """Of all sections, or of those of some patches."""
        wanted = None if patches is None else set(patches)
        return [
            hunk
            for section in self.sections
            if wanted is None or section.patch in wanted
            for hunk in section.hunks
        ]

    def text(self) -> str:
        parts = [f"{SPDX}\n"]
        for section in self.sections:
            parts += ["\n" if len(parts) > 1 else "", *section.head]
            for hunk in section.hunks:
                parts += [f"{hunk.header}\n", *hunk.lines]
        return "".join(parts)


def parse(path: str, text: str) -> EditFile:
    """Reads an edit file.

    Args:
        path: of the release's file.

    Raises:
        OverlayError: a line that is no part of an edit file.
    """
    edit, lines = EditFile(path, []), text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        last = edit.sections[-1] if edit.sections else None
        if line.startswith("@@"):
            if last is None:
                raise _error(path, number, "a section starts with '# Why: …'")
            last.hunks.append(_hunk(path, number, line))
        elif line.startswith(f"# {LABELS[0]}:"):
            if last and last.hunks and last.hunks[-1].lines[-1:] == ["\n"]:
                last.hunks[-1].lines.pop()  # it separates the sections
            edit.sections.append(Section([line]))
        elif last is None:
            if line.strip() and line.rstrip() != SPDX:
                raise _error(path, number, "a section starts with '# Why: …'")
        elif last.hunks:
            last.hunks[-1].lines.append(line)
        elif line.startswith("#"):
            last.head.append(line)
        else:
            raise _error(path, number, f"our lines stand below {FORMS}")
    for hunk in edit.hunks():
        _require_lines(path, hunk, lines[hunk.line - 1])
    return edit


def _hunk(path: str, number: int, line: str) -> Hunk:
    found = HEADER.fullmatch(line.rstrip())
    if not found:
        raise _error(path, number, f"{line.rstrip()!r} is not one of {FORMS}")
    start = end = None
    if found["after"] or found["top"]:
        start = end = int(found["after"] or 0)
    elif found["first"]:
        start, end = int(found["first"]) - 1, int(found["last"] or found["first"])
        if end <= start:
            raise _error(path, number, f"no lines are meant by {line.rstrip()!r}")
    return Hunk(found["member"] or IMPORTS, start, end, [], number)


def _require_lines(path: str, hunk: Hunk, header: str) -> None:
    if ("removing" in header) == bool(hunk.lines):
        what = "has lines, say 'replacing'" if hunk.lines else "has no lines of ours"
        raise _error(path, hunk.line, f"the hunk {what}")


def _error(path: str, line: int, what: str) -> OverlayError:
    return OverlayError(f"{path}{SUFFIX}:{line}: {what}")


def placed(source: Source, hunks: Iterable[Hunk]) -> list[tuple[int, int, Hunk]]:
    """Hunks with the lines that they replace, in the order of the file.

    At one place hunks keep the order of the edit file.

    Raises:
        OverlayError: two hunks replace the same line.
    """
    found = sorted(
        ((*hunk.place(source), hunk) for hunk in hunks), key=lambda p: (p[0], p[1])
    )
    at = 0
    for start, end, hunk in found:
        if start < at:
            raise hunk.error(source.path, "another hunk replaces these lines")
        at = end
    return found


def tagged(source: Source, hunks: Iterable[Hunk]) -> Iterator[tuple[str, int | Hunk]]:
    """The composed lines, each with its index in the pinned file, or its hunk."""
    at = 0
    for start, end, hunk in placed(source, hunks):
        yield from zip(source.lines[at:start], range(at, start), strict=True)
        yield from ((line, hunk) for line in hunk.lines)
        at = end
    yield from zip(source.lines[at:], range(at, len(source.lines)), strict=True)


def composed(source: Source, hunks: Iterable[Hunk]) -> str:
    """The release's file with our lines in it."""
    return "".join(line for line, _ in tagged(source, hunks))


def noted(source: Source, edit: EditFile) -> str:
    """The same, and the line at its end that says so."""
    return composed(source, edit.hunks()) + NOTE.format(path=source.path)
