# SPDX-License-Identifier: Apache-2.0
"""The Python standard library's own source as training and evaluation text."""

from collections.abc import Iterable
from pathlib import Path

# In every CPython from 3.11 to 3.14 each is one pure-Python file.
HELD_OUT = (
    "calendar", "cmd", "configparser", "csv", "fractions", "ftplib", "gettext",
    "heapq", "plistlib", "pstats", "selectors", "shlex", "socketserver",
    "statistics", "tempfile", "textwrap", "uuid", "wave",
)  # fmt: skip
# Tables and generated prose, which teach a code model little.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip
MAX_BYTES = 400_000


def training_files(stdlib: Path) -> list[Path]:
    """All modules and their tests, but for the held-out modules and theirs."""
    return [p for p in sorted(stdlib.rglob("*.py")) if _trains(p.relative_to(stdlib))]


def _trains(path: Path) -> bool:
    if SKIPPED_FOLDERS & set(path.parts):
        return False
    stems = {part.removesuffix(".py") for part in path.parts}
    return not any({name, f"test_{name}"} & stems for name in HELD_OUT)


def held_out_files(stdlib: Path) -> list[Path]:
    return [stdlib / f"{name}.py" for name in HELD_OUT]


def read_texts(files: Iterable[Path]) -> list[str]:
    """The files' texts; those that are not UTF-8 or are too long are left out."""
    texts = []
    for path in files:
        data = path.read_bytes()
        if len(data) > MAX_BYTES:
            continue
        try:
            texts.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            continue  # a test of source encodings
    return texts


def excerpts(text: str, count: int) -> list[str]:
    """``count`` tails of the text that begin at a line, evenly spread over it."""
    lines = text.splitlines(keepends=True)
    starts = [len(lines) * i // (count + 1) for i in range(count)]
    return ["".join(lines[start:]) for start in starts]
