# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks, for pull-request texts: made of their JSON on export.

A text has `<!-- measured: speed -->` where the table of that name goes.
"""

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import BASE, Comparison, ratio
from benchmarks.spec_decode.lossless.table import WRONG, split
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL
from benchmarks.spec_decode.results import OURS
from benchmarks.spec_decode.shapes import MODES
from benchmarks.spec_decode.tables import NAMES, Cell, percent, table, times

from .series import SeriesError

RESULTS = files.RESULTS / "nvidia-h200"
DRAFTS = 7
MARK = re.compile(r"<!-- measured: ([\w-]+) -->")
ALONE = "target"  # drafts nothing


def filled(text: str, folder: Path = RESULTS) -> str:
    """A pull-request text with its tables.

    Raises:
        SeriesError: there is no table of a name, or nothing was measured for it.
    """

    def found(mark: re.Match) -> str:
        if mark[1] not in TABLES:
            raise SeriesError(f"{mark[0]}: there is {', '.join(sorted(TABLES))}")
        if not (made := TABLES[mark[1]](folder)):
            raise SeriesError(f"{mark[0]}: {folder} holds no results for it")
        return made.strip()

    return MARK.sub(found, text)


def speed(folder: Path) -> str:
    """Throughput to that of the release, by kind of drafter and requests."""
    compared = Comparison(files.load(folder / "engine.json"))

    def cell(mode: str, requests: int) -> Cell:
        pair = [compared.at(n, mode, DRAFTS, EQUAL, requests) for n in (OURS, BASE)]
        return times(ratio(*pair))

    about = (
        f"Tokens per second to those of the release's faster runner, K={DRAFTS}, equal "
        "acceptance length; by requests at once."
    )
    return _by_requests(compared, EQUAL, cell, about)


def auto(folder: Path) -> str:
    """Speed of "auto" as a share of the best fixed length's."""
    compared = Comparison(files.load(folder / "engine.json"))

    def cell(mode: str, requests: int) -> Cell:
        try:
            return percent(compared.by_draft_length(mode, requests).share)
        except LookupError:
            return None

    about = (
        'Speed of "auto" as a share of that of the best fixed length that was '
        "measured; by requests at once."
    )
    return _by_requests(compared, BY_POSITION, cell, about)


def _by_requests(
    compared: Comparison,
    acceptance: str,
    cell: Callable[[str, int], Cell],
    about: str,
) -> str:
    modes = [mode for mode in MODES if mode != "none"]
    requests = sorted(
        {n for mode in modes for n in compared.values(mode, acceptance)[1]}
    )
    rows = [[NAMES[mode], *(cell(mode, n) for n in requests)] for mode in modes]
    rows = [row for row in rows if any(row[1:])]
    if not rows:
        return ""
    found = table(["drafter", *map(str, requests)], rows)
    return f"{about} {_where(compared.results)}\n\n{found}"


def lossless(folder: Path) -> str:
    """Of chi-square tests, by setting: how many, their smallest p, and the controls."""
    results = files.load(folder / "lossless.json")
    p_values: dict[str, dict[bool, list[float]]] = {}
    for name, row in results.get("measurements", {}).items():
        engine, setting = split(name)
        if engine != ALONE:
            kinds = p_values.setdefault(setting, {False: [], True: []})
            kinds[engine.startswith(WRONG)].append(row["p_value"])
    rows = [
        [setting, len(own), f"{min(own):.4f}", len(wrong), f"{max(wrong):.1g}"]
        for setting, kinds in sorted(p_values.items())
        for own, wrong in [(kinds[False], kinds[True])]
        if own and wrong
    ]
    if not rows:
        return ""
    counts = sorted({row["samples"] for row in results["measurements"].values()})
    about = (
        f"Chi-square of {' or '.join(map(str, counts))} outputs a test against their "
        "exact distribution: every drafter, drafts greedy, drawn, and drawn and "
        "verified as a block. Controls accept by a wrong rule, and must fail. "
        f"{_where(results)}"
    )
    head = ("outputs of", "tests", "smallest p", "controls", "their largest p")
    return f"{about}\n\n{table(head, rows)}"


def _where(results: files.Results) -> str:
    last = max(results["runs"])
    device = results["runs"][last]["device"]
    return f"{device['name']}, torch {device['torch']}, {last[:10]}."


TABLES = {"auto": auto, "lossless": lossless, "speed": speed}
