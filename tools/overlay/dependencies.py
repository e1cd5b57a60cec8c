# SPDX-License-Identifier: Apache-2.0
"""What a base wheel's metadata asks for, and what our requirements say."""

from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .base import ROOT

Requirements = dict[str, set[str]]  # name to specifiers with markers


def read_requirements(path: Path) -> list[str]:
    """The requirements of a file and of those it includes by `-r`."""
    found = []
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r"):
            found += read_requirements(path.parent / line.removeprefix("-r").strip())
        elif line:
            found.append(line)
    return found


def info_text(wheel: ZipFile, name: str) -> bytes:
    """A file of the wheel's dist-info; empty if it has none of that name."""
    for path in wheel.namelist():
        folder, _, file = path.partition("/")
        if folder.endswith(".dist-info") and file == name:
            return wheel.read(path)
    return b""


def by_name(lines: list[str]) -> Requirements:
    """What counts on this machine type; a condition on Python's version is kept."""
    found: Requirements = {}
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and "python_" not in str(marker):
            if not marker.evaluate({"extra": ""}):
                continue
            requirement.marker = None
        name = canonicalize_name(requirement.name)
        requirement.name = ""
        found.setdefault(name, set()).add(str(requirement))
    return found


def dependency_changes(wheel: ZipFile, device: str, root: Path = ROOT) -> list[str]:
    """How our requirements for a device differ from what the wheel asks for."""
    headers = message_from_bytes(info_text(wheel, "METADATA"))
    theirs = by_name(headers.get_all("Requires-Dist", []))
    ours = by_name(read_requirements(root / "requirements" / f"{device}.txt"))
    found = []
    for name in sorted(theirs.keys() | ours.keys()):
        wanted, have = (
            " and ".join(sorted(side.get(name, ()))) or "any version"
            for side in (theirs, ours)
        )
        if name not in ours:
            found.append(f"`{name}`: missing here, the base asks for `{wanted}`")
        elif name not in theirs:
            found.append(f"`{name}`: here `{have}`, the base does not ask for it")
        elif ours[name] != theirs[name]:
            found.append(f"`{name}`: here `{have}`, the base asks for `{wanted}`")
    return found


def metadata_changes(old: ZipFile, new: ZipFile) -> list[str]:
    """What differs in Python range, extras and entry points."""
    found = []
    before, after = (
        message_from_bytes(info_text(wheel, "METADATA")) for wheel in (old, new)
    )
    for header in ("Requires-Python", "Provides-Extra"):
        was, now = (", ".join(side.get_all(header, [])) for side in (before, after))
        if was != now:
            found.append(f"- {header}: `{was}` became `{now}`")
    was, now = entry_points(old), entry_points(new)
    found += [f"- entry point gone: `{line}`" for line in sorted(was - now)]
    found += [f"- entry point new: `{line}`" for line in sorted(now - was)]
    return found


def entry_points(wheel: ZipFile) -> set[str]:
    lines = info_text(wheel, "entry_points.txt").decode().splitlines()
    return {line for line in lines if "=" in line}
