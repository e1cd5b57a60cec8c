# SPDX-License-Identifier: Apache-2.0
"""Edit files: `vllm/a.py.edit` holds our lines in the release's `vllm/a.py`.

A file consists of sections. A section begins with comments that say why it is needed,
which patch of the series it belongs to, and until when. Its hunks follow, each with a
header line that says where, and our lines as they are in the composed file:

    # Why: nothing tells how long drafting takes.
    # Patch: metrics
    # Until: upstream times drafting.
    @@ GPUModelRunner.sample_tokens, after line 38
            self.step_clock.sampled()

Lines are counted from the first line of the member, decorators included, in the pinned
file, not in the composed one. Several hunks at the same place keep their order.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from .base import OverlayError
from .members import IMPORTS, Source

SUFFIX = ".edit"
SPDX = "# SPDX-License-Identifier: Apache-2.0\n"
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
# The licence requires this: Apache-2.0, section 4b.
NOTE = "# Modified by AnyDraft: vLLM's file with the lines of {path}.edit in it.\n"


@dataclass
class Hunk:
    """Our lines, and the 0-based lines [start, end) of a member that they replace.

    `start` and `end` are None at the end of the member, and for imports. `number` is
    the header's line in the edit file, for messages.
    """

    member: str
    start: int | None
    end: int | None
    lines: list[str]
    number: int = 0

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
        """The 0-based lines [start, end) of the file that it replaces.

        Raises:
            OverlayError: the file lacks the member, or the member has fewer lines.
        """
        if self.member == IMPORTS:
            return source.last_import, source.last_import
        span = source.span(self.member)
        if span is None:
            raise self.error(source.path, f"vLLM's file has no {self.member}")
        first, last = span[0] - 1, span[1]
        if self.start is None:
            return last, last
        if first + self.end > last:
            count = last - first
            raise self.error(source.path, f"{self.member} has only {count} lines")
        return first + self.start, first + self.end

    def error(self, path: str, what: str) -> OverlayError:
        return error(path, self.number, f"{what}: '{self.header}'")


@dataclass
class Section:
    """Hunks with one purpose, and the comment lines that state it."""

    head: list[str]
    hunks: list[Hunk] = field(default_factory=list)

    def says(self, label: str) -> str:
        """The text after a label; empty without the label."""
        text = "".join(line.removeprefix("#") for line in self.head)
        found = re.search(
            rf"(?ms)^ {label}:(.*?)(?=^ (?:{'|'.join(LABELS)}):|\Z)", text
        )
        return " ".join(found[1].split()) if found else ""


@dataclass
class EditFile:
    """The edits of one file; `path` is the release's file, without `.edit`."""

    path: str
    sections: list[Section]

    def hunks(self, patches: Collection[str] | None = None) -> list[Hunk]:
        """Hunks of all sections, or of the sections of some patches."""
        return [
            hunk
            for section in self.sections
            if patches is None or section.says("Patch") in patches
            for hunk in section.hunks
        ]

    def text(self) -> str:
        return SPDX + "\n".join(
            "".join([*s.head, *(f"{h.header}\n{''.join(h.lines)}" for h in s.hunks)])
            for s in self.sections
        )


def error(path: str, number: int, what: str) -> OverlayError:
    return OverlayError(f"{path}{SUFFIX}:{number}: {what}")


def parse(path: str, text: str) -> EditFile:
    """Parses the edit file of a file of the release; raises OverlayError."""
    edit, lines = EditFile(path, []), text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        last = edit.sections[-1] if edit.sections else None
        if line.startswith(f"# {LABELS[0]}:"):
            if last and last.hunks and last.hunks[-1].lines[-1:] == ["\n"]:
                last.hunks[-1].lines.pop()  # it separates the sections
            edit.sections.append(Section([line]))
        elif last is None:
            if line.strip() and line != SPDX:
                raise error(path, number, "a section starts with '# Why: …'")
        elif line.startswith("@@"):
            last.hunks.append(_hunk(path, number, line.rstrip()))
        elif last.hunks:
            last.hunks[-1].lines.append(line)
        elif line.startswith("#"):
            last.head.append(line)
        else:
            raise error(path, number, f"before our lines stands one of {FORMS}")
    for hunk in edit.hunks():
        if ("removing" in lines[hunk.number - 1]) == bool(hunk.lines):
            raise hunk.error(path, "lines are replaced by ours, or removed without")
    return edit


def _hunk(path: str, number: int, line: str) -> Hunk:
    found = HEADER.fullmatch(line)
    if not found:
        raise error(path, number, f"{line!r} is not one of {FORMS}")
    start = end = None
    if found["after"] or found["top"]:
        start = end = int(found["after"] or 0)
    elif found["first"]:
        start, end = int(found["first"]) - 1, int(found["last"] or found["first"])
        if end <= start:
            raise error(path, number, f"{line!r} means no line")
    return Hunk(found["member"] or IMPORTS, start, end, [], number)


def placed(source: Source, hunks: Iterable[Hunk]) -> list[tuple[int, int, Hunk]]:
    """Hunks with the lines [start, end) of the file that they replace, in file order.

    Raises:
        OverlayError: a hunk does not fit the file, or two replace the same line.
    """
    found = sorted(((*h.place(source), h) for h in hunks), key=lambda place: place[:2])
    at = 0
    for start, end, hunk in found:
        if start < at:
            raise hunk.error(source.path, "another hunk replaces this line")
        at = end
    return found


def tagged(source: Source, hunks: Iterable[Hunk]) -> Iterator[tuple[str, int | Hunk]]:
    """The composed lines, each with its index in the release's file or its hunk."""
    at = 0
    for start, end, hunk in placed(source, hunks):
        yield from ((source.lines[i], i) for i in range(at, start))
        yield from ((line, hunk) for line in hunk.lines)
        at = end
    yield from ((source.lines[i], i) for i in range(at, len(source.lines)))


def composed(source: Source, hunks: Iterable[Hunk]) -> str:
    """The release's file with our lines in it."""
    return "".join(line for line, _ in tagged(source, hunks))
