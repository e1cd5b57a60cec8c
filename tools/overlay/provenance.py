# SPDX-License-Identifier: Apache-2.0
"""What a recorded result was made from, and when."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .base import ROOT


def provenance(record: Path, root: Path = ROOT) -> dict[str, Any]:
    """The commit, whether anything but the record was not committed, and the day."""
    others = ["--", ".", f":(exclude){record.resolve()}"]
    is_inside = record.resolve().is_relative_to(root.resolve())
    changed = _git(root, "status", "--porcelain", *(others if is_inside else []))
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "has_uncommitted": bool(changed),
        "date": datetime.now(UTC).date().isoformat(),
    }


def source_of(result: dict[str, Any]) -> str:
    """The same for a page."""
    source = f"`{result['commit'][:10]}`"
    return source + " and changes not committed" * result["has_uncommitted"]


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", *command], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
