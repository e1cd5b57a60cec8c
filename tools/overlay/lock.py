# SPDX-License-Identifier: Apache-2.0
"""`edits.lock`: the members of the release that our lines were written for.

It has a line `<sha256>  <path>  <member>`, with the hash of the member's text, for each
member that a hunk touches or an addition relies on.
"""

from collections.abc import Iterable
from pathlib import Path

from .base import ROOT, OverlayError
from .edits import EditFile
from .members import IMPORTS
from .relied import Key, Reader
from .tree import Release, edit_files

NAME = "edits.lock"


def touched(edits: Iterable[EditFile]) -> set[Key]:
    """Members that hunks touch, except imports, which fit any other imports."""
    return {(e.path, h.member) for e in edits for h in e.hunks() if h.member != IMPORTS}


def read_lock(root: Path = ROOT) -> dict[Key, str]:
    file = root / NAME
    lines = file.read_text().splitlines() if file.exists() else []
    return {(path, member): digest for digest, path, member in map(str.split, lines)}


def to_lock(release: Release, root: Path = ROOT) -> set[Key]:
    return touched(edit_files(root)) | Reader(release, root).relied_on()


def write_lock(release: Release, root: Path = ROOT) -> int:
    """Locks all members to a release; returns their number."""
    keys = sorted(to_lock(release, root))
    digests = (release.source(path).digest(member) for path, member in keys)
    lines = (f"{d}  {k[0]}  {k[1]}\n" for d, k in zip(digests, keys, strict=True))
    (root / NAME).write_text("".join(lines))
    return len(keys)


def lock_problems(release: Release, root: Path = ROOT) -> list[str]:
    """Differences between the lock, our hunks and a release, one line each."""
    lock = read_lock(root)
    missing = sorted(touched(edit_files(root)) - lock.keys())
    found = [f"{path}: {member} is not in {NAME}" for path, member in missing]
    for (path, member), known in lock.items():
        source = release.source(path)
        if source.digest(member) != known:
            word = "changed" if source.span(member) else "is gone"
            found.append(f"{path}: {member} {word}")
    return found


def require_lock(release: Release, root: Path = ROOT) -> None:
    """Raises OverlayError if our lines were not written for a release."""
    if found := lock_problems(release, root):
        raise OverlayError(
            "The overlay was not written for this release:\n  "
            + "\n  ".join(found)
            + "\nReview what stands on these members, then run "
            "`python -m tools.overlay lock`; or go on anyway with "
            "VLLM_ALLOW_CHANGED_MEMBERS=1."
        )
