# SPDX-License-Identifier: Apache-2.0
"""What a recorded result was made from, and when."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .base import ROOT


def provenance(root: Path = ROOT) -> dict[str, Any]:
    """The commit, whether anything was not committed, and the day."""
    return {
        "commit": _git(root, "rev-parse", "HEAD"),
        "has_uncommitted": bool(_git(root, "status", "--porcelain")),
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
