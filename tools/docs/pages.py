# SPDX-License-Identifier: Apache-2.0
"""The Markdown pages of the repository, and the pieces of them that are checked."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import DOCS, ROOT

# `<!-- needs: gpu -->` before a block of commands: what a test lacks for them.
NEEDS = {
    "gpu": "a GPU",
    "network": "more of the network than a package index",
    "time": "more minutes than a test may take",
    "sites": "two installs, ours and the base",
}
_FENCE = re.compile(
    r"(?:^<!-- needs: (?P<needs>\w+) -->\n+)?"
    r"^(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=ticks)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def pages() -> list[Path]:
    """Every page that tells of commands, files or tests, each once."""
    folders = ("benchmarks", "examples", "models")
    found = [*ROOT.glob("*.md"), *DOCS.glob("**/*.md")]
    for folder in folders:
        found += (ROOT / folder).glob("**/*.md")
    return sorted(page for page in found if not page.is_symlink())


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        info: what stands behind the opening ticks: `bash`, `diff`.
        needs: what it needs that a test machine lacks, one of NEEDS; "" if nothing.
    """

    page: Path
    line: int
    info: str
    needs: str
    body: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("ticks")) + 1
        info, needs = found["info"].strip(), found["needs"] or ""
        yield Fence(page, line, info, needs, found["body"])


def hidden_blocks(page: Path) -> Iterator[int]:
    """Lines of code that is no block to `fences`: indented, or fenced within a list."""
    lines = _blanked(page.read_text()).splitlines()
    for number, line in enumerate(lines, start=1):
        before = lines[number - 2].strip() if number > 1 else ""
        is_code = re.match(r" {4}|\t", line) and line.strip() and not before
        if is_code or line.lstrip().startswith("```"):
            yield number


def _blanked(text: str) -> str:
    """The text without its fenced blocks, on the same lines."""
    return _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)


def commands(fence: Fence) -> list[str]:
    """The commands of a block: continued lines joined, comments left out."""
    lines: list[str] = []
    for line in re.sub(r"\\\n\s*", "", fence.body).splitlines():
        line = re.sub(r"(^|\s)#\s.*$", "", line).rstrip()
        if not line.strip():
            continue
        if lines and _is_open(lines[-1]):
            lines[-1] += "\n" + line
        else:
            lines.append(line.strip())
    return lines


def _is_open(command: str) -> bool:
    """Whether a quote of the command goes on in the next line."""
    return command.count("'") % 2 == 1


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each `code span` outside fenced blocks."""
    text = _blanked(text)
    for found in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        yield text.count("\n", 0, found.start()) + 1, found[1]


def links(text: str) -> Iterator[tuple[int, str]]:
    """Line and target of each Markdown link and picture outside fenced blocks."""
    text = _blanked(text)
    for found in re.finditer(r"\]\(([^)\s]+)\)", text):
        yield text.count("\n", 0, found.start()) + 1, found[1]
