# SPDX-License-Identifier: Apache-2.0
"""Which overlay files are seams, and the lock on what they stand on.

An overlay file whose path the base has too is a seam; any other is an addition.
`seams.lock` holds one line per seam, `<sha256>  <path>` as `sha256sum` writes it:
the hash of the upstream file on the release that the seam was written for.
"""

import hashlib
from pathlib import Path
from zipfile import ZipFile

from .base import ROOT, OverlayError

PACKAGE = "vllm"
UPSTREAM = f"{PACKAGE}/_upstream"


def overlay_files(root: Path = ROOT) -> list[str]:
    """Paths, relative to the root, of all that lies over the base. Sorted."""
    files = (root / PACKAGE).rglob("*")
    return sorted(
        str(file.relative_to(root))
        for file in files
        if file.is_file() and "__pycache__" not in file.parts
    )


def seams_among(files: list[str], wheel: ZipFile) -> list[str]:
    upstream = set(wheel.namelist())
    return [file for file in files if file in upstream]


def upstream_place(path: str) -> str:
    """Where the composed tree keeps the upstream file that a seam stands on."""
    return UPSTREAM + path.removeprefix(PACKAGE)


def read_lock(root: Path = ROOT) -> dict[str, str]:
    lock = root / "seams.lock"
    lines = lock.read_text().splitlines() if lock.exists() else []
    pairs = (line.split("  ", 1) for line in lines if line.strip())
    return {path: digest for digest, path in pairs}


def write_lock(wheel: ZipFile, root: Path = ROOT) -> dict[str, str]:
    """Locks every seam to the given wheel."""
    lock = current_hashes(seams_among(overlay_files(root), wheel), wheel)
    text = "".join(f"{digest}  {path}\n" for path, digest in lock.items())
    (root / "seams.lock").write_text(text)
    return lock


def current_hashes(paths: list[str], wheel: ZipFile) -> dict[str, str]:
    return {path: hashlib.sha256(wheel.read(path)).hexdigest() for path in paths}


def lock_problems(seams: list[str], wheel: ZipFile, root: Path = ROOT) -> list[str]:
    """One line for each way in which seams, lock and wheel disagree."""
    lock, found = read_lock(root), current_hashes(seams, wheel)
    unlocked = [f"{path}: not in seams.lock" for path in seams if path not in lock]
    changed = [
        f"{path}: the base's file is not the one this seam was written for"
        for path in seams
        if path in lock and lock[path] != found[path]
    ]
    stale = [
        f"{path}: in seams.lock, but no seam stands on it any more"
        if path in wheel.namelist()
        else f"{path}: the base no longer has this file"
        for path in lock
        if path not in found
    ]
    return unlocked + changed + stale


def require_lock(seams: list[str], wheel: ZipFile, root: Path = ROOT) -> None:
    problems = lock_problems(seams, wheel, root)
    if problems:
        raise OverlayError(
            "The tree does not fit this base:\n  " + "\n  ".join(problems) + "\n"
            "Review each seam against the new file, then run "
            "`python -m tools.overlay lock`; or go on anyway with "
            "VLLM_ALLOW_CHANGED_SEAMS=1."
        )
