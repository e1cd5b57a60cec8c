# SPDX-License-Identifier: Apache-2.0
"""The table of what the counting proof found."""

from typing import Any

from benchmarks.spec_decode.tables import Cell, table

WRONG = "wrong rule/"  # what names of engines begin with that must be found out


def lossless_text(tests: dict[str, dict[str, Any]]) -> str:
    """An engine in a row; in a cell the p-value and the acceptance length."""
    if not tests:
        return ""
    found = {split(name): row for name, row in tests.items()}
    engines, settings = (sorted({key[i] for key in found}) for i in range(2))
    rows = [
        [engine, *(cell(found.get((engine, setting))) for setting in settings)]
        for engine in engines
    ]
    counts = sorted({row["samples"] for row in tests.values()})
    samples = " or ".join(map(str, counts))
    about = f"p of {samples} outputs a cell, then the acceptance length."
    return f"{about}\n\n" + table(["outputs of", *settings], rows)


def split(name: str) -> tuple[str, str]:
    """The engine, and the setting that follows it from its temperature on."""
    engine, _, setting = name.partition("/T")
    return engine, f"T{setting}"


def cell(row: dict[str, Any] | None) -> Cell:
    if row is None:
        return None
    length = row["acceptance_length"]
    return f"{row['p_value']:.4f}" + ("" if length is None else f", {length:.2f}")
