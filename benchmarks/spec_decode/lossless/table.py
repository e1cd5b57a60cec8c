# SPDX-License-Identifier: Apache-2.0
"""The table of what the counting proof found."""

from typing import Any

from benchmarks.spec_decode.tables import table


def lossless_table(tests: dict[str, dict[str, Any]]) -> str:
    rows = [
        [name, row["samples"], f"{row['p_value']:.4f}", row["acceptance_length"]]
        for name, row in tests.items()
    ]
    return table(["outputs of", "samples", "p", "acceptance length"], rows)
