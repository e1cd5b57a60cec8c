# SPDX-License-Identifier: Apache-2.0
"""The series: which file of ours goes into which patch, and where it goes.

`series.toml` names files and globs. A file that it names itself belongs to that patch
alone, whatever else matches; any other must match one glob.
"""

import re
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tools.overlay.base import ROOT, OverlayError
from tools.overlay.seams import overlay_files

from .fold import Rule

SERIES = Path(__file__).with_name("series.toml")
FOLDERS = ("tests",)
DOWNSTREAM = "downstream"


class SeriesError(OverlayError):
    """series.toml and the repository disagree; the message says what to write."""


@dataclass(frozen=True)
class Patch:
    """One pull request.

    Attributes:
        title: of the commit and the pull request.
        text: file of the pull-request text: purpose, test plan, results.
        files: files and globs.
        parts: of seams that other patches take for the rest, the names it takes.
    """

    title: str
    text: str
    files: list[str]
    parts: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """Patches in order, why other files stay here, and how to fold and place files."""

    patches: list[Patch]
    downstream: dict[str, str]
    places: dict[str, str]
    rules: dict[str, Rule]

    def homes(self, root: Path = ROOT) -> dict[str, int | str]:
        """For each of our files the number of its patch, or DOWNSTREAM.

        Raises:
            SeriesError: a file has no home, or more than one, or a name no file.
        """
        files = our_files(root)
        wanted: list[tuple[int | str, str]] = [
            (number, glob)
            for number, patch in enumerate(self.patches)
            for glob in patch.files
        ]
        wanted += [(DOWNSTREAM, glob) for glob in self.downstream]
        problems = [
            f"{glob} matches no file: remove it"
            for _, glob in wanted
            if not any(fnmatchcase(file, glob) for file in files)
            and not (root / glob).is_file()
        ]
        named = {glob for _, glob in wanted if (root / glob).is_file()}
        homes: dict[str, int | str] = {}
        for file in sorted({*files, *named}):
            found = [
                home
                for home, glob in wanted
                if (glob == file if file in named else fnmatchcase(file, glob))
            ]
            if len(found) != 1:
                problems.append(f"{file} is in {len(found)} places, not one")
            homes[file] = found[0] if found else DOWNSTREAM
        if problems:
            raise SeriesError(
                "tools/upstream/series.toml: " + "\n  ".join(problems) + "\n"
                "Name each file in one patch, or under [downstream] with the reason."
            )
        return homes

    def files(self, number: int, homes: dict[str, int | str]) -> list[str]:
        """Our files that patch `number` adds, changes or takes a part of. Sorted."""
        mine = {file for file, home in homes.items() if home == number}
        return sorted(mine | self.patches[number].parts.keys())

    def takes(self, path: str, number: int, homes: dict[str, int | str]):
        """Whether a name of a seam is folded once patch `number` is applied."""
        parts = {
            name: at
            for at, patch in enumerate(self.patches)
            for name in patch.parts.get(path, [])
        }
        return lambda name: parts.get(name, homes[path]) <= number

    def place(self, path: str) -> str:
        """Where a file goes in the base's tree: by the longest prefix there is."""
        for prefix in sorted(self.places, key=len, reverse=True):
            if path == prefix or path.startswith(f"{prefix}/"):
                return self.places[prefix] + path.removeprefix(prefix)
        return path


def load(path: Path = SERIES) -> Series:
    content = tomllib.loads(path.read_text())
    rules = {
        rule["path"]: Rule(tuple(rule.get("drop", ())), rule.get("replace", {}))
        for rule in content.get("fold", [])
    }
    patches = [Patch(**patch) for patch in content["patch"]]
    return Series(patches, content["downstream"], content["places"], rules)


def our_files(root: Path = ROOT) -> list[str]:
    """What the series has to place: the overlay and its tests. Sorted."""
    tests = (root / folder for folder in FOLDERS)
    found = [
        str(file.relative_to(root))
        for folder in tests
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    ]
    return sorted([*overlay_files(root), *found])


def reworded(text: str) -> str:
    """Words of this repository as upstream would say them: "the base" is vLLM."""
    return re.sub(r"\b[Tt]he base\b(?![\w-])", "vLLM", text)


def rewritten(text: str, path: str, moves: dict[str, str]) -> str:
    """A file's text where it and others have moved: their names, and the way up.

    Args:
        text: of the file.
        path: in this repository.
        moves: path here to path in the base's tree, of all files that move.
    """
    for old, new in sorted(moves.items(), reverse=True):
        text = re.sub(rf"(?<![\w/]){re.escape(old)}\b", new, text)
        if old.endswith(".py"):
            dotted, there = (
                p.removesuffix(".py").replace("/", ".") for p in (old, new)
            )
            text = re.sub(rf"(?<![\w.]){re.escape(dotted)}\b", there, text)
    if path in moves:
        up, further = path.count("/"), moves[path].count("/")
        text = text.replace(f"parents[{up}]", f"parents[{further}]")
    return text
