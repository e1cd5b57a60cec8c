# SPDX-License-Identifier: Apache-2.0
"""The files of this repository's overlay, and of the release below it."""

from pathlib import Path
from zipfile import ZipFile

from .base import ROOT
from .edits import SUFFIX, EditFile, parse
from .members import Source

PACKAGE = "vllm"
FOLDERS = (PACKAGE, "tools", "tests", "examples", "benchmarks")


def files_in(folder: str, root: Path = ROOT) -> list[str]:
    """Sorted paths of all files in a folder of the repository, relative to the root."""
    return sorted(
        str(file.relative_to(root))
        for file in (root / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    )


def additions(root: Path = ROOT) -> list[str]:
    return [path for path in files_in(PACKAGE, root) if not path.endswith(SUFFIX)]


def edit_files(root: Path = ROOT) -> list[EditFile]:
    """Raises OverlayError if one cannot be parsed."""
    return [
        parse(path.removesuffix(SUFFIX), (root / path).read_text())
        for path in files_in(PACKAGE, root)
        if path.endswith(SUFFIX)
    ]


def module_paths(module: str) -> tuple[str, str]:
    """The files that a module or a package of this name may be."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def python_files(root: Path = ROOT) -> list[str]:
    """Sorted paths of all our Python files, relative to the root."""
    found = (file for name in FOLDERS for file in (root / name).rglob("*.py"))
    found = [*root.glob("*.py"), *found]
    return sorted(str(file.relative_to(root)) for file in found)


class Release:
    """The files of a release's wheel; each Python file is parsed once."""

    def __init__(self, wheel: ZipFile) -> None:
        self.wheel, self.names = wheel, set(wheel.namelist())
        self._sources: dict[str, Source] = {}

    def source(self, path: str) -> Source:
        """A file of the release; empty if there is none."""
        if path not in self._sources:
            text = self.wheel.read(path).decode() if path in self.names else ""
            self._sources[path] = Source(path, text)
        return self._sources[path]

    def modules(self) -> list[str]:
        """Sorted paths of its Python files."""
        return sorted(name for name in self.names if name.endswith(".py"))

    @property
    def name(self) -> str:
        return Path(self.wheel.filename).name
