# SPDX-License-Identifier: Apache-2.0
"""The Python standard library's own source as training text."""

import json
from contextlib import suppress
from pathlib import Path

# Each is a single pure-Python file in every CPython from 3.11 to 3.14.
MODELS = Path(__file__).resolve().parents[2] / "models"
HELD_OUT = json.loads((MODELS / "held_out.json").read_text())
# Installed packages, and tables and generated text, which teach a code model little.
SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data",
}  # fmt: skip
MAX_BYTES = 400_000


def training_texts(stdlib: Path) -> list[str]:
    """All modules and tests, except the held-out modules and their tests.

    Files that are not UTF-8 or too long are skipped.
    """
    texts = []
    for path in sorted(stdlib.rglob("*.py")):
        if _trains(path.relative_to(stdlib)) and path.stat().st_size <= MAX_BYTES:
            with suppress(UnicodeDecodeError):  # a test of source encodings
                texts.append(path.read_bytes().decode())
    return texts


def _trains(path: Path) -> bool:
    if SKIPPED_FOLDERS & set(path.parts):
        return False
    stems = {part.removesuffix(".py") for part in path.parts}
    return not any({name, f"test_{name}"} & stems for name in HELD_OUT)
