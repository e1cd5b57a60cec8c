# SPDX-License-Identifier: Apache-2.0
"""Families of drafters and their checkpoints, as the tests that passed found them."""

import importlib.util
import json
import sys
from typing import Any

from . import ROOT

FAMILIES = ROOT / "vllm" / "config" / "drafter" / "families.py"
PASSED = ROOT / "tests" / "checkpoints" / "passed.json"


def _families() -> tuple[Any, ...]:
    """Detection alone: it is plain Python, and importing vLLM takes seconds."""
    spec = importlib.util.spec_from_file_location("draft_families", FAMILIES)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks itself up
    spec.loader.exec_module(module)
    return module.FAMILIES


def _passed(weights: str = "") -> dict[str, dict[str, Any]]:
    found = json.loads(PASSED.read_text())
    return {name: row for name, row in found.items() if weights in row["weights"]}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _settings(row: dict[str, Any]) -> tuple[str, ...]:
    found = row["detected"]
    mask = "–" if found["mask"] == "None" else found["mask"]
    return found["drafts"], found["width"], mask, found["fed_by"]


def family_table() -> str:
    """Each family, and what its checkpoint with trained weights came to."""
    trained = {row["detected"]["family"]: row for row in _passed("trained").values()}
    rows = []
    for family in _families():
        row = trained[family.name]
        told = family.name, family.told_by, f"`{family.method}`", str(family.num_drafts)
        by_position = " ".join(f"{rate:.2f}" for rate in row["acceptance_by_position"])
        length = f"{row['acceptance_length']:.2f}"
        rows.append((*told, *_settings(row), length, by_position))
    head = ("family", "told by", "method", "K if unsaid", "K found", "a pass", "mask")
    return _table((*head, "fed by", "acceptance length", "by position"), rows)


def checkpoint_table() -> str:
    """Each checkpoint of random weights, and how many drafts were compared."""
    rows = [
        (name, row["detected"]["family"], *_settings(row), str(row["drafts_compared"]))
        for name, row in _passed("random").items()
    ]
    head = ("checkpoint", "family", "K", "a pass", "mask", "fed by")
    return _table((*head, "drafts compared"), rows)


def provenance() -> str:
    """Which releases the tables are of, and what wrote them."""
    rows = _passed().values()
    bases = ", ".join(sorted({row["base"] for row in rows}))
    dates = sorted({row["date"] for row in rows})
    when = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
    return (
        f"Both tables: vLLM {bases}, {when}, by `python -m tests.checkpoints.record`; "
        "a test fails where detection has changed since."
    )
