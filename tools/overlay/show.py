# SPDX-License-Identifier: Apache-2.0
"""Prints hunks within the lines of the release that they stand in."""

from collections.abc import Iterator

from .edits import SUFFIX, EditFile, Hunk
from .members import Source

CONTEXT = 3  # lines
BOLD, RED, GREEN, CYAN, OFF = "\033[1m", "\033[31m", "\033[32m", "\033[36m", "\033[0m"


def show(source: Source, edit: EditFile, colour: bool) -> Iterator[str]:
    """The lines to print, without line ends."""

    def painted(code: str, text: str) -> str:
        return f"{code}{text}{OFF}" if colour else text

    yield painted(BOLD, f"{edit.path}{SUFFIX}")
    for section in edit.sections:
        yield ""
        yield from (painted(BOLD, line.rstrip()) for line in section.head)
        for hunk in section.hunks:
            yield painted(CYAN, hunk.header)
            for mark, line in within(source, hunk):
                code = {"-": RED, "+": GREEN}.get(mark)
                text = f"{mark}{line.rstrip()}"
                yield painted(code, text) if code else text


def within(source: Source, hunk: Hunk) -> Iterator[tuple[str, str]]:
    start, end = hunk.place(source)
    parts = (
        (" ", source.lines[max(0, start - CONTEXT) : start]),
        ("-", source.lines[start:end]),
        ("+", hunk.lines),
        (" ", source.lines[end : end + CONTEXT]),
    )
    for mark, lines in parts:
        yield from ((mark, line) for line in lines)
