# SPDX-License-Identifier: Apache-2.0
"""Looks up whether this tree has fallen behind vLLM's releases."""

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zipfile import ZipFile

from packaging.version import Version

from .base import OverlayError

ALLOWED = timedelta(days=1)


def newest_version(project: str) -> str:
    """The newest final release on pip's index; raises OverlayError."""
    command = [sys.executable, "-m", "pip", "index", "versions", project]
    done = subprocess.run(command, capture_output=True, text=True)
    if not (found := re.match(rf"{re.escape(project)} \((\S+)\)", done.stdout)):
        raise OverlayError(
            f"pip could not look up the releases of {project}:\n{done.stderr}"
            "Check the network and pip's index."
        )
    return found[1]


def is_newer(version: str, base: str) -> bool:
    return Version(version) > Version(base)


def build_time(wheel: Path) -> datetime:
    """When a release's wheel was built, by the newest date of its files."""
    with ZipFile(wheel) as archive:
        newest = max(entry.date_time for entry in archive.infolist())
    return datetime(*newest, tzinfo=UTC)


def lateness(version: str, wheel: Path, base: str, now: datetime) -> str | None:
    """What is wrong with staying on a base; None while there is time to move."""
    built = build_time(wheel)
    if not is_newer(version, base) or now - built <= ALLOWED:
        return None
    return (
        f"vLLM {version} was built on {built:%Y-%m-%d}, {(now - built).days} days ago, "
        f"and this tree is on {base}: move it as docs/rebasing.md says."
    )
