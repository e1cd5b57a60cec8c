# SPDX-License-Identifier: Apache-2.0
"""The series: which of our files belong to which patch, and their paths upstream.

`series.toml` lists additions and tests as globs, of which the longest match decides.
Sections of edit files name their patch themselves.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tools.overlay.base import ROOT, OverlayError
from tools.overlay.tree import additions, files_in

SERIES = Path(__file__).with_name("series.toml")
DOWNSTREAM = -1  # instead of a patch's number: not for upstream
# Our tests' folder upstream, which has a tests/conftest.py of its own.
TESTS = "tests/v1/spec_decode/unified/"


@dataclass(frozen=True)
class Patch:
    """A pull request: `text` is the path of its description."""

    title: str
    text: str
    files: list[str]

    @property
    def slug(self) -> str:
        """Its name in sections of edit files."""
        return Path(self.text).stem


@dataclass(frozen=True)
class Series:
    """All patches, and globs of files that are not for upstream, with the reason."""

    patches: list[Patch]
    downstream: dict[str, str]

    def homes(self, root: Path = ROOT) -> dict[str, int]:
        """For each file, the number of its patch, or DOWNSTREAM.

        Raises:
            OverlayError: a file matches no glob, or a glob matches no file.
        """
        wanted = {glob: n for n, p in enumerate(self.patches) for glob in p.files}
        wanted |= dict.fromkeys(self.downstream, DOWNSTREAM)
        files = {*additions(root), *files_in("tests", root)}
        files.update(name for name in wanted if (root / name).is_file())
        homes, used, lost = {}, set(), []
        for file in sorted(files):
            found = [glob for glob in wanted if fnmatchcase(file, glob)]
            used.update(found)
            if found:
                homes[file] = wanted[max(found, key=len)]
            else:
                lost.append(f"{file} is nowhere, name it in a patch")
        lost += [f"{glob} matches no file, remove it" for glob in wanted.keys() - used]
        if lost:
            raise OverlayError("tools/upstream/series.toml: " + "\n  ".join(lost))
        return homes


def place(path: str) -> str:
    """The path of a file upstream."""
    if not path.startswith("tests/"):
        return path
    return TESTS + path.removeprefix("tests/").removeprefix("v1/")


def moved(text: str, path: str, files: Iterable[str]) -> str:
    """A file's text upstream: with the new paths and module names of files that move,
    and with `parents[...]` adapted.

    Args:
        files: of the series, with their paths here.
    """
    for old in sorted((file for file in files if place(file) != file), reverse=True):
        text = re.sub(rf"(?<![\w/]){re.escape(old)}\b", place(old), text)
        names = [p.removesuffix(".py").replace("/", ".") for p in (old, place(old))]
        text = re.sub(rf"(?<![\w.]){re.escape(names[0])}\b", names[1], text)
    up, further = path.count("/"), place(path).count("/")
    return text.replace(f"parents[{up}]", f"parents[{further}]")


def load(path: Path = SERIES) -> Series:
    content = tomllib.loads(path.read_text())
    patches = [Patch(**patch) for patch in content.pop("patch")]
    return Series(patches, **content)
