# SPDX-License-Identifier: Apache-2.0
"""Finds runs of lines that our files share with the base: we copy nothing."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

WINDOW = 6  # as many lines in a row are a copy, not a coincidence
FOLDERS = ("vllm", "tools", "tests", "examples", "benchmarks")
# Imports and signatures: an interface can be met in no other words.
HEADER = re.compile(r"\s*((from\s\S+\s+)?import|(async\s+)?def)\b")
NO_CODE = re.compile(r"""#.*|"[^"]*"|'[^']*'""")

Lines = list[tuple[int, str]]  # line number, text without white space


def squeeze(line: str) -> str:
    """A line without white space and without a trailing comment."""
    return "".join(line.partition("  #")[0].split())


def telling_lines(text: str) -> Lines:
    """The lines that say something: no blanks, comments, headers, punctuation."""
    found, depth = [], 0  # depth of the parentheses that a header has opened
    for number, line in enumerate(text.splitlines(), 1):
        if depth > 0 or HEADER.match(line):
            code = NO_CODE.sub("", line)
            depth += code.count("(") - code.count(")")
            continue
        depth = 0
        key = squeeze(line)
        # Fewer than five letters and digits: `else:`, `pass`, `self,`, `):`.
        if not key.startswith("#") and len(re.sub(r"[\W_]", "", key)) > 4:
            found.append((number, key))
    return found


def windows(lines: Lines) -> Iterator[tuple[int, tuple[str, ...]]]:
    texts = [text for _, text in lines]
    for start in range(len(texts) - WINDOW + 1):
        yield start, tuple(texts[start : start + WINDOW])


def our_files(root: Path) -> Iterator[Path]:
    yield from root.glob("*.py")
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def base_sources(wheel: ZipFile) -> Iterator[tuple[str, str]]:
    for name in wheel.namelist():
        if name.endswith(".py"):
            yield name, wheel.read(name).decode(errors="replace")


def repeats(ours: dict[str, str], base: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each run of lines in `ours` that a file of `base` has too.

    Both arguments are paths and their texts. Ours is indexed and the base, which
    is a thousand times larger, is read once.
    """
    lines = {path: telling_lines(text) for path, text in ours.items()}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    for path, known in lines.items():
        for start, window in windows(known):
            places.setdefault(window, []).append((path, start))
    keys = {key for window in places for key in window}
    hits: dict[tuple[str, int], str] = {}
    for name, text in base:
        if sum(squeeze(line) in keys for line in text.splitlines()) < WINDOW:
            continue
        there = telling_lines(text)
        for start, window in windows(there):
            for place in places.get(window, ()):
                hits.setdefault(place, f"{name}:{there[start][0]}")
    return list(_runs(hits, lines))


def _runs(hits: dict[tuple[str, int], str], lines: dict[str, Lines]) -> Iterator[str]:
    """Joins windows that overlap, so that each run is told once."""
    for path, start in sorted(hits):
        if (path, start - 1) in hits:
            continue
        length = WINDOW
        while (path, start + length - WINDOW + 1) in hits:
            length += 1
        yield (
            f"{path}:{lines[path][start][0]}: repeats {length} lines of the base's "
            f"{hits[path, start]}, cut the change so that it needs none of them"
        )


def repeat_problems(wheel: ZipFile, root: Path) -> list[str]:
    ours = {str(path.relative_to(root)): path.read_text() for path in our_files(root)}
    return repeats(ours, base_sources(wheel))
