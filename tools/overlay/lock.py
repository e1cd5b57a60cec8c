# SPDX-License-Identifier: Apache-2.0
"""`edits.lock`: a hash of each member of the release that our lines were written for.

One line per member that a hunk touches or an addition relies on:
`<sha256>  <path>  <member>`, of its text in the pinned release.
"""

from collections.abc import Iterable
from pathlib import Path

from .base import ROOT, OverlayError
from .edits import EditFile
from .members import IMPORTS
from .tree import Release, edit_files

Key = tuple[str, str]  # path, member
NAME = "edits.lock"


def touched(edits: Iterable[EditFile]) -> set[Key]:
    """Members that hunks touch; imports may be put in whatever stands there."""
    return {
        (edit.path, hunk.member)
        for edit in edits
        for hunk in edit.hunks()
        if hunk.member != IMPORTS
    }


def read_lock(root: Path = ROOT) -> dict[Key, str]:
    file = root / NAME
    lines = file.read_text().splitlines() if file.exists() else []
    parts = (line.split("  ") for line in lines)
    return {(path, member): digest for digest, path, member in parts}


def write_lock(release: Release, keys: Iterable[Key], root: Path = ROOT) -> None:
    lines = (f"{release.source(k[0]).digest(k[1])}  {k[0]}  {k[1]}\n" for k in keys)
    (root / NAME).write_text("".join(sorted(lines, key=lambda line: line[66:])))


def changed(release: Release, root: Path = ROOT) -> list[Key]:
    """Locked members that are gone from a release, or not as they were."""
    return sorted(
        key
        for key, digest in read_lock(root).items()
        if release.source(key[0]).digest(key[1]) != digest
    )


def problems(release: Release, root: Path = ROOT) -> list[str]:
    """How the lock differs from the hunks and from the release, a line for each."""
    missing = touched(edit_files(root)) - read_lock(root).keys()
    found = [f"{path}: {member} is not in {NAME}" for path, member in sorted(missing)]
    for path, member in changed(release, root):
        word = "changed" if release.source(path).span(member) else "is gone"
        found.append(f"{path}: {member} {word}")
    return found


def require_lock(release: Release, root: Path = ROOT) -> None:
    """Raises OverlayError where our lines were not written for this release."""
    if found := problems(release, root):
        raise OverlayError(
            "The overlay does not fit this release:\n  " + "\n  ".join(found) + "\n"
            "Review what relies on these members, then run "
            "`python -m tools.overlay lock`; or go on anyway with "
            "VLLM_ALLOW_CHANGED_MEMBERS=1."
        )
