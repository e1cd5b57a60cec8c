# SPDX-License-Identifier: Apache-2.0
"""The Python standard library's own source as training and evaluation text."""

import json
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


def training_texts(stdlib: Path) -> list[str]:
    """All modules and their tests, but for the held-out modules and theirs."""
    files = sorted(stdlib.rglob("*.py"))
    return _read(path for path in files if _trains(path.relative_to(stdlib)))


def _trains(path: Path) -> bool:
    if SKIPPED_FOLDERS & set(path.parts):
        return False
    stems = {part.removesuffix(".py") for part in path.parts}
    return not any({name, f"test_{name}"} & stems for name in HELD_OUT)


def held_out_excerpts(stdlib: Path, per_module: int) -> list[str]:
    """Tails of the held-out modules that begin at a line, evenly spread over each."""
    excerpts = []
    for text in _read(stdlib / f"{name}.py" for name in HELD_OUT):
        lines = text.splitlines(keepends=True)
        starts = (len(lines) * i // (per_module + 1) for i in range(per_module))
        excerpts += ["".join(lines[start:]) for start in starts]
    return excerpts


def write_held_out(folder: Path) -> None:
    names = json.dumps(list(HELD_OUT), indent=1)
    (folder / "held_out.json").write_text(names + "\n")


def _read(files: Iterable[Path]) -> list[str]:
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
