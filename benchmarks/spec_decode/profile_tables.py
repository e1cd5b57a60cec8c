# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of profiles and of what recording CUDA graphs took."""

from collections.abc import Iterator
from typing import Any

from benchmarks.spec_decode.compare import Comparison, busy_share
from benchmarks.spec_decode.results import PointKey
from benchmarks.spec_decode.tables import NAMES, Cell, ms, percent, table

STEP_HEAD = (
    "engine",
    "kernels run, ms",
    "step without profiler, ms",
    "GPU busy",
    "kernels",
    "of them draft",
    "launches",
    "graphs",
    "copies",
    "to host",
    "waits",
)
# Counts of a step: on the device, then what the host does for them.
COUNTS = {
    "kernels": "device_kernels",
    "launches": "kernel_launches",
    "graphs": "graph_launches",
    "copies": "copies",
    "to host": "device_to_host",
    "waits": "synchronisations",
    "operations": "host_operations",
}


def profile_sections(compared: Comparison) -> Iterator[tuple[str, str]]:
    yield "Where the time of a step goes", step_table(compared)
    yield "What drafting adds to a step", diet_table(compared)
    engines = compared.results.get("engines", {})
    yield "What recording CUDA graphs takes", capture_table(engines)


def step_table(compared: Comparison) -> str:
    """What a steady step does. The profiler makes the host slower, so a step's
    duration is that of the same run without it."""
    rows = []
    for key, profile in _profiles(compared):
        row = compared.row(key)
        if row is not None and row.run != profile.get("run"):
            row = None  # of another run, perhaps of another state of the code
        rows.append(
            [
                str(key),
                ms(busy_s(profile)),
                row and ms(row.step_s),
                percent(busy_share(profile, row)),
                profile["device_kernels"],
                profile["draft_kernels"],
                *(profile.get(name) for name in list(COUNTS.values())[1:-1]),
            ]
        )
    return table(STEP_HEAD, rows)


def busy_s(profile: dict[str, Any]) -> float | None:
    """Seconds of a step in which a kernel runs."""
    share = profile["busy_share"]
    return None if share is None else share * profile["step_s"]


def _profiles(compared: Comparison) -> Iterator[tuple[PointKey, dict[str, Any]]]:
    found = compared.results.get("profiles", {})
    for key in sorted(map(PointKey.parse, found), key=_order):
        if key.engine.shapes == compared.shapes:
            yield key, found[str(key)]


def _order(key: PointKey) -> tuple:
    mode, k = key.engine.mode, key.engine.num_tokens
    return list(NAMES).index(mode), k, key.concurrency, key.engine.implementation


def diet_table(compared: Comparison) -> str:
    """A profile's counts less those of the same runner without speculation."""
    rows = []
    profiles = dict(_profiles(compared))
    for key, profile in profiles.items():
        plain = _plain(key, profiles)
        if key.engine.mode == "none" or plain is None:
            continue
        rows.append(
            [
                NAMES[key.engine.mode],
                key.engine.num_tokens,
                key.concurrency,
                key.engine.implementation,
                *(_more(profile, plain, name) for name in COUNTS.values()),
            ]
        )
    return table(("mode", "K", "requests", "", *COUNTS), rows)


def _plain(key: PointKey, profiles: dict[PointKey, dict]) -> dict[str, Any] | None:
    """Without speculation a step does the same at any concurrency: the nearest."""
    known = [
        other
        for other in profiles
        if other.engine.mode == "none"
        and other.engine.implementation == key.engine.implementation
    ]
    if not known:
        return None
    return profiles[min(known, key=lambda k: abs(k.concurrency - key.concurrency))]


def _more(profile: dict, plain: dict, name: str) -> Cell:
    if name not in profile or name not in plain:
        return None
    return f"{profile[name] - plain[name]:+.1f}"


def capture_table(engines: dict[str, Any]) -> str:
    """Seconds and GiB, the drafter's part beside it where a runner has one."""
    rows = []
    for name, engine in sorted(engines.items()):
        found = engine.get("graph_capture", {})
        if "all" not in found:
            continue
        cells: list[Cell] = [name, engine["cudagraph_mode"]]
        for what in ("all", "drafter"):
            part = found.get(what)
            taken = part and part.get("reserved_bytes")
            cells += [part and part["s"], None if taken is None else taken / 2**30]
        rows.append([*cells, engine["draft_full_graphs"]])
    head = ("engine", "graphs", "s", "GiB", "drafter, s", "drafter, GiB", "FULL ones")
    return table(head, rows)
