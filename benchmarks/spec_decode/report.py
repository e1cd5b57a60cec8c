# SPDX-License-Identifier: Apache-2.0
"""Writes `report.md` beside the results of each device: tables of all points."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import MAIN, MODES
from benchmarks.spec_decode.results import OURS, PointKey
from benchmarks.spec_decode.traces import EQUAL

NAMES = {
    "none": "no speculation",
    "draft": "draft model",
    "pard": "PARD",
    "pard2": "PARD-2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "mtp": "MTP",
}
PLACE = ["shapes", "acceptance", "mode", "context", "requests"]
VLLM = "vLLM"  # the faster of the release's runners at a point


def points(results: files.Results) -> pd.DataFrame:
    """A row for each measured point: medians over its repeats, times in ms.

    `steady` is tokens/s of steady decode at the expected acceptance length, so that it
    does not vary with the acceptance of a round; `drawn` is tokens/s at the round's own
    acceptance. Where the expected length is unknown, `steady` is `drawn`.
    """
    rows = [_point(*item) for item in results.get("measurements", {}).items()]
    found = pd.DataFrame(rows)
    if rows:
        found["mode"] = pd.Categorical(found["mode"], list(MODES), ordered=True)
    return found


def _point(text: str, point: dict[str, Any]) -> dict[str, Any]:
    key, repeats = PointKey.parse(text), point["repeats"]

    def value(name: str, scale: float = 1.0) -> float | None:
        known = [r[name] for r in repeats if r.get(name) is not None]
        return median(known) * scale if known else None

    speeds = [repeat["tokens_per_s"] for repeat in repeats]
    engine, steady = key.engine, value("expected_tokens_per_s")
    known = [r for r in repeats if r.get("mean_step_s")]
    of_rounds = [r["tokens_per_step"] / r["mean_step_s"] for r in known]
    drawn = key.concurrency * median(of_rounds) if known else None
    return {
        "point": text,
        "side": OURS if engine.implementation == OURS else VLLM,
        "runner": engine.implementation,
        "shapes": engine.shapes,
        "acceptance": key.acceptance,
        "mode": engine.mode,
        "context": key.context,
        "requests": key.concurrency,
        "setting": engine.setting,
        "tokens/s": median(speeds),
        "± %": 50 * (max(speeds) - min(speeds)) / median(speeds),
        "steady": drawn if steady is None else steady,
        "drawn": drawn,
        "step": value("step_s", 1e3),
        "draft": value("draft_s", 1e3),
        "run": point["run"][:16],
    }


def compare(found: pd.DataFrame) -> pd.DataFrame:
    """Adds ratios to other points: of tokens/s at the same setting, else of steady."""
    is_ours, is_alone = found["side"] == OURS, found["mode"] == "none"
    is_chain = found["setting"].str.fullmatch(r"K\d+")
    rivals = {
        "to vLLM": (~is_ours, "tokens/s", [*PLACE, "setting"]),
        "to the best chain": (is_ours & is_chain, "steady", PLACE),
        "to vLLM's best": (~is_ours, "steady", PLACE),
        "to none": (is_alone, "steady", ["shapes", "context", "requests"]),
    }
    for name, (rows, column, place) in rivals.items():
        groups = (
            found[column].where(rows).groupby([found[c] for c in place], observed=True)
        )
        found[name] = (found[column] / groups.transform("max")).where(is_ours)
    return found


def beside(found: pd.DataFrame, place: list[str]) -> pd.DataFrame:
    """This tree and vLLM's faster runner at their best settings, and their ratio."""
    fastest = found.groupby(["side", *place], observed=True)["tokens/s"].idxmax()
    best = found.loc[fastest].set_index(place)
    columns = {
        f"{side}: {name}": best.loc[best["side"] == side, name]
        for name in ("tokens/s", "setting")
        for side in (OURS, VLLM)
    }
    shown = pd.DataFrame(columns).sort_index()
    return shown.assign(ratio=shown[f"{OURS}: tokens/s"] / shown[f"{VLLM}: tokens/s"])


def starts(results: files.Results) -> pd.DataFrame:
    """Start-up time and memory of engines, and the FULL CUDA graphs they captured."""
    rows = {
        name: {
            "start, s": engine.get("start_s"),
            "reserved, GiB": engine.get("reserved_bytes", float("nan")) / (1 << 30),
            "target's graphs": engine.get("target_full_graphs"),
            "drafter's graphs": engine.get("draft_full_graphs"),
        }
        for name, engine in sorted(results.get("engines", {}).items())
    }
    found = pd.DataFrame.from_dict(rows, orient="index").rename_axis("engine")
    return found.dropna(axis=1, how="all")


def sections(name: str, results: files.Results) -> Iterator[tuple[str, pd.DataFrame]]:
    """Titles and tables of a results file."""
    found = points(results)
    if name == "engine":
        is_main = (found["shapes"] == MAIN) & (found["acceptance"] == EQUAL)
        title = "each mode at its best K, tokens/s, equal acceptance length"
        yield title, beside(found[is_main], PLACE[2:])
    yield "what starting takes", starts(results)
    if not found.empty:
        order = [*PLACE[:3], "context", "requests", "setting", "runner"]
        every = compare(found).drop(columns=["point", "side"])
        yield "all points (tokens/s; times in ms)", every.set_index(order).sort_index()


def markdown(table: pd.DataFrame) -> str:
    """A table with its index as the first columns; empty without rows."""
    if table.empty:
        return ""
    table = table.reset_index()
    if "mode" in table:
        table["mode"] = table["mode"].map(NAMES)
    for name in table.select_dtypes("number"):
        is_big = table[name].max() >= 100 and not name.startswith("±")
        shape = "{:.0f}" if is_big else "{:.3g}"
        table[name] = table[name].map(shape.format, na_action="ignore")
    return table.astype(object).fillna("–").to_markdown(index=False)


def report(folder: Path) -> str:
    """The whole report of one device; empty if no file has points."""
    found = {path.stem: files.load(path) for path in sorted(folder.glob("*.json"))}
    parts = [
        f"## `{name}.json`: {title}\n\n{text}"
        for name, results in found.items()
        if name == "start" or _is_measured(results)  # else of another program
        for title, table in sections(name, results)
        if (text := markdown(table))
    ]
    if not parts:
        return ""
    head = [f"# {folder.name}", "Last measured by:", *_runs(found)]
    return "\n\n".join([*head, *parts]) + "\n"


def _is_measured(results: files.Results) -> bool:
    """Whether a file has points of the engine benchmark."""
    return any("repeats" in each for each in results.get("measurements", {}).values())


def _runs(found: dict[str, files.Results]) -> Iterator[str]:
    """The command and date of each file's last run."""
    for name, results in found.items():
        if about := results.get("about"):  # put together from several runs
            yield f"- `{name}.json`: {about}"
        elif runs := results.get("runs"):
            last = max(runs)
            yield f"- `{name}.json`, {last[:10]}: `{runs[last].get('command', '')}`"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=files.RESULTS)
    args = parser.parse_args(arguments)
    for folder in sorted(path for path in args.results.iterdir() if path.is_dir()):
        if text := report(folder):
            (folder / "report.md").write_text(text)


if __name__ == "__main__":
    main()
