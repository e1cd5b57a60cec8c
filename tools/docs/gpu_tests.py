# SPDX-License-Identifier: Apache-2.0
"""Which tests ran on a GPU, over which base, and what they came to."""

import json
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.results import RESULTS


def gpu_test_table(folder: Path = RESULTS) -> str:
    """A row for each test file, a column for each base and device."""
    runs = [
        json.loads(p.read_text()) for p in sorted(folder.glob("*/gpu-tests-*.json"))
    ]
    if not runs:
        return "No results yet."
    ran = [
        f"{run['base']} on {run['device']}, {run['date']}, {run['software']}: "
        f"{_counts(run['total'])}."
        for run in runs
    ]
    failed = [
        f"- over {run['base']}: `{test}`" for run in runs for test in run["failed"]
    ]
    parts = ["\n".join(f"- {line}" for line in ran), _table(runs)]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    return "\n\n".join(parts)


def _table(runs: list[dict[str, Any]]) -> str:
    head = ["tests", *(run["base"] for run in runs)]
    lines = [head, ["---"] + ["---:"] * len(runs)]
    for file in sorted({file for run in runs for file in run["files"]}):
        cells = (run["files"].get(file) for run in runs)
        lines.append([f"`{file}`", *("–" if c is None else _counts(c) for c in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counts(found: dict[str, int]) -> str:
    kinds = ("passed", "failed", "skipped")
    return ", ".join(f"{found[kind]} {kind}" for kind in kinds if found.get(kind))
