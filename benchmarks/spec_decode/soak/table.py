# SPDX-License-Identifier: Apache-2.0
"""The table of what soaks found."""

from typing import Any

from benchmarks.spec_decode.tables import NAMES, Cell, table

COUNTS = {
    "requests": "requests",
    "answered": "whole",
    "streams closed": "aborted",
    "disconnects": "disconnected",
    "tokens": "tokens",
    "wrong tokens": "wrong_tokens",
    "ties": "ties",
    "tokens after them": "tokens_after_ties",
    "errors": "errors",
    "preemptions": "preemptions",
    "leaked blocks": "leaked_blocks",
}


def mib(num_bytes: int | None) -> str | None:
    return None if num_bytes is None else f"{num_bytes / (1 << 20):+.0f}"


def cells(mode: str, found: dict[str, Any]) -> list[Cell]:
    return [
        NAMES[mode],
        found["dtype"],
        round(found["seconds"]),
        found["clients"],
        *(found.get(name) for name in COUNTS.values()),
        mib(found["rss_growth_bytes"]),
        mib(found["rss_late_growth_bytes"]),
        mib(found["gpu_growth_bytes"]),
        found["acceptance_length"],
    ]


def soak_table(soaks: dict[str, dict[str, Any]]) -> str:
    head = ["drafter", "", "seconds", "clients", *COUNTS]
    head += ["RSS, MiB", "from half time on", "GPU, MiB", "acceptance length"]
    return table(head, [cells(mode, found) for mode, found in sorted(soaks.items())])
