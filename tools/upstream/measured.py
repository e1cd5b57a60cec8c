# SPDX-License-Identifier: Apache-2.0
"""Figures of the benchmarks, for pull-request texts: made of their JSON on export.

A text has `<!-- measured: speed -->` where the table of that name goes.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL
from benchmarks.spec_decode.report import NAMES, beside, by_setting, points

from .series import SeriesError

RESULTS = files.RESULTS / "nvidia-h200"
DRAFTS = 7
MARK = re.compile(r"<!-- measured: ([\w-]+) -->")
# Of lossless.json: an engine that drafts nothing, and those that must be found out.
ALONE, WRONG = "target", "wrong rule/"


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
    found = _points(folder, EQUAL)
    if found.empty:
        return ""
    same = found[(found["K"] == DRAFTS) & found["setting"].eq(f"K{DRAFTS}")]
    ratios = beside(same, ["mode", "requests"], [])["ratio"]
    about = (
        f"Tokens per second to those of the release's faster runner, K={DRAFTS}, equal "
        "acceptance length; by requests at once."
    )
    return f"{about} {_where(folder)}\n\n" + _by_requests(
        ratios, lambda ratio: f"{ratio:.2f}×"
    )


def auto(folder: Path) -> str:
    """Speed of "auto" as a share of the best fixed length's."""
    found = _points(folder, BY_POSITION)
    if found.empty:
        return ""
    shares = by_setting(found).filter(like="auto to the best chain").max(axis=1)
    about = (
        'Speed of "auto" as a share of that of the best fixed length that was '
        "measured; by requests at once."
    )
    shares = shares.droplevel("context")
    table = _by_requests(shares, lambda share: f"{share * 100:.0f} %")
    return f"{about} {_where(folder)}\n\n{table}"


def _points(folder: Path, acceptance: str) -> pd.DataFrame:
    """Those of the usual shapes and context."""
    found = points(files.load(folder / "engine.json"))
    if found.empty:
        return found
    usual = found["shapes"].eq(files.MAIN_SHAPES) & found["acceptance"].eq(acceptance)
    return found[usual & found["context"].eq(files.MAIN_CONTEXT)]


def _by_requests(values: pd.Series, cell: Callable[[float], str]) -> str:
    """A Markdown table with a row for each mode that has values."""
    table = values.unstack("requests").dropna(how="all").sort_index(axis=1)
    table = table.map(lambda value: "–" if pd.isna(value) else cell(value))
    table.index = [NAMES[mode] for mode in table.index]
    return table.rename_axis("drafter").to_markdown()


def lossless(folder: Path) -> str:
    """Of chi-square tests, by setting: how many, their smallest p, and the controls."""
    results = files.load(folder / "lossless.json")
    p_values: dict[str, dict[bool, list[float]]] = {}
    for name, row in results.get("measurements", {}).items():
        engine, _, setting = name.partition("/T")
        if engine != ALONE:
            kinds = p_values.setdefault(setting, {False: [], True: []})
            kinds[engine.startswith(WRONG)].append(row["p_value"])
    rows = [
        (f"T{setting}", len(own), f"{min(own):.4f}", len(wrong), f"{max(wrong):.1g}")
        for setting, kinds in sorted(p_values.items())
        for own, wrong in [(kinds[False], kinds[True])]
        if own and wrong
    ]
    if not rows:
        return ""
    counts = sorted({row["samples"] for row in results["measurements"].values()})
    where = _where(folder, "lossless")
    about = (
        f"Chi-square of {' or '.join(map(str, counts))} outputs a test against their "
        "exact distribution: every drafter, drafts greedy, drawn, and drawn and "
        f"verified as a block. Controls accept by a wrong rule, and must fail. {where}"
    )
    head = ["outputs of", "tests", "smallest p", "controls", "their largest p"]
    table = pd.DataFrame(rows, columns=head)
    return f"{about}\n\n" + table.to_markdown(index=False, disable_numparse=True)


def _where(folder: Path, name: str = "engine") -> str:
    runs = files.load(folder / f"{name}.json")["runs"]
    last = max(runs)
    device = runs[last]["device"]
    return f"{device['name']}, torch {device['torch']}, {last[:10]}."


TABLES = {"auto": auto, "lossless": lossless, "speed": speed}
