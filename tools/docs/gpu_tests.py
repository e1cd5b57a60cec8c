# SPDX-License-Identifier: Apache-2.0
"""Which tests ran on a GPU, over which base, and what they came to.

Results are those of `tools.ci.counts`. Whoever keeps them may say `why` a test failed,
by its name, and name tests that were begun and not ended (`unfinished`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.results import RESULTS
from tools.overlay.provenance import source_of


def gpu_test_table(folder: Path = RESULTS) -> str:
    """A row for each test file, a column for each base and device."""
    runs = [
        json.loads(p.read_text()) for p in sorted(folder.glob("*/gpu-tests-*.json"))
    ]
    if not runs:
        return "No results yet."
    ran = [
        f"{run['base']} on {run['device']}, {run['date']}, {run['software']}: "
        f"{_counts(run['total'])}{_commits(run)}."
        for run in runs
    ]
    parts = ["\n".join(f"- {line}" for line in ran), _table(runs)]
    for title, key in (("Failed", "failed"), ("Begun and not ended", "unfinished")):
        if named := [line for run in runs for line in _named(run, key)]:
            parts.append(f"{title}:\n\n" + "\n".join(named))
    return "\n\n".join(parts)


def _commits(run: dict[str, Any]) -> str:
    known = run.get("sources", {}).values()
    commits = sorted({source_of(source) for source in known})
    return f", from {', '.join(commits)}" if commits else ""


def _named(run: dict[str, Any], key: str) -> Iterator[str]:
    for test in run.get(key, []):
        why = run.get("why", {}).get(test)
        yield f"- over {run['base']}: `{test}`" + (f". {why}" if why else "")


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
