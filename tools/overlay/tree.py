# SPDX-License-Identifier: Apache-2.0
"""The overlay's files: additions, and edits of the release's files."""

from pathlib import Path
from zipfile import ZipFile

from .base import ROOT
from .edits import SUFFIX, EditFile, parse
from .members import Source

PACKAGE = "vllm"


def overlay_files(root: Path = ROOT) -> list[str]:
    """Paths, relative to the root, of all that this repository's vllm/ has. Sorted."""
    return sorted(
        str(file.relative_to(root))
        for file in (root / PACKAGE).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )


def additions(root: Path = ROOT) -> list[str]:
    return [path for path in overlay_files(root) if not path.endswith(SUFFIX)]


def edit_files(root: Path = ROOT) -> list[EditFile]:
    """Raises OverlayError where one cannot be read."""
    return [
        parse(path.removesuffix(SUFFIX), (root / path).read_text())
        for path in overlay_files(root)
        if path.endswith(SUFFIX)
    ]


class Release:
    """The Python files of a release's wheel; each is parsed once."""

    def __init__(self, wheel: ZipFile) -> None:
        self.wheel = wheel
        self.names = set(wheel.namelist())
        self._sources: dict[str, Source] = {}

    def source(self, path: str) -> Source:
        """Empty where the release has no such file."""
        if path not in self._sources:
            text = self.wheel.read(path).decode() if path in self.names else ""
            self._sources[path] = Source(path, text)
        return self._sources[path]
