# SPDX-License-Identifier: Apache-2.0
"""Finds runs of lines that our files share with the release: nothing is copied."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .edits import SUFFIX, EditFile
from .tree import Release, python_files

WINDOW = 6  # this many lines in a row are a copy, not a coincidence
# Imports and signatures: an interface leaves no other way to write them.
HEADER = re.compile(r"\s*((from\s\S+\s+)?import|(async\s+)?def)\b")
NO_CODE = re.compile(r"""#.*|"[^"]*"|'[^']*'""")

Lines = list[tuple[int, str]]  # line number, text without white space


def squeeze(line: str) -> str:
    """A line without white space and without a trailing comment."""
    return "".join(line.partition("  #")[0].split())


def telling_lines(text: str) -> Lines:
    """The significant lines: no blanks, comments, headers, or mere punctuation."""
    found, depth = [], 0  # parentheses that a header has opened
    for number, line in enumerate(text.splitlines(), 1):
        if depth > 0 or HEADER.match(line):
            code = NO_CODE.sub("", line)
            depth += code.count("(") - code.count(")")
            continue
        depth = 0
        key = squeeze(line)
        # Not with fewer than five letters and digits: `else:`, `pass`, `self,`, `):`.
        if not key.startswith("#") and len(re.sub(r"[\W_]", "", key)) > 4:
            found.append((number, key))
    return found


def windows(lines: Lines) -> Iterator[tuple[int, tuple[str, ...]]]:
    texts = [text for _, text in lines]
    for start in range(len(texts) - WINDOW + 1):
        yield start, tuple(texts[start : start + WINDOW])


def repeats(root: Path, edits: Iterable[EditFile], release: Release) -> list[str]:
    """One line for each run of our lines that a file of the release has too."""
    ours = {path: (root / path).read_text() for path in python_files(root)}
    for edit in edits:
        lines = (line for hunk in edit.hunks() for line in hunk.lines)
        ours[edit.path + SUFFIX] = "".join(lines)
    return shared(ours, ((n, release.source(n).text) for n in release.modules()))


def shared(ours: dict[str, str], theirs: Iterable[tuple[str, str]]) -> list[str]:
    """The same for paths and texts.

    Ours are indexed; theirs, a thousand times as many, are read only once.
    """
    lines = {path: telling_lines(text) for path, text in ours.items()}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, known in lines.items():
        for start, window in windows(known):
            places.setdefault(window, []).append((path, start))
    keys = {key for window in places for key in window}
    hits: dict[tuple[str, int], str] = {}
    for name, text in theirs:
        if sum(squeeze(line) in keys for line in text.splitlines()) < WINDOW:
            continue
        there = telling_lines(text)
        for start, window in windows(there):
            for place in places.get(window, ()):
                hits.setdefault(place, f"{name}:{there[start][0]}")
    return [
        f"{path}:{lines[path][start][0]}: repeats lines of vLLM's {hits[path, start]}, "
        "cut the change so that it needs none of them"
        for path, start in sorted(hits)
        if (path, start - 1) not in hits  # the first of a run
    ]
