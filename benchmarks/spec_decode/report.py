# SPDX-License-Identifier: Apache-2.0
"""Writes `report.md` beside the results of each device: tables of all points."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import MAIN, MODES
from benchmarks.spec_decode.results import KEY, MAIN_CONTEXT, OURS
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
    "lilicorr": "LiLiCorr",
    "dspark": "DSpark",
    "mtp": "MTP",
}
PLACE = ["shapes", "acceptance", "mode", "context", "requests"]
VLLM = "vLLM"  # the faster of the release's runners at a point
MEASURED = ["tokens_per_s", "expected_tokens_per_s", "tokens_per_step"]
MEASURED += ["step_s", "mean_step_s", "draft_s"]
STARTS = {
    "start_s": "start, s",
    "reserved_bytes": "reserved, GiB",
    "target_full_graphs": "target's graphs",
    "draft_full_graphs": "drafter's graphs",
}


def points(results: files.Results) -> pd.DataFrame:
    """A row for each measured point: medians over its repeats, times in ms.

    `steady` is tokens/s of steady decode at the expected acceptance length, so that it
    does not vary with the acceptance of a round; `drawn` is tokens/s at the round's own
    acceptance. Where the expected length is unknown, `steady` is `drawn`.
    """
    keys = pd.Series([*results["measurements"]], name="point")
    measured = pd.DataFrame(map(_measured, results["measurements"].values()))
    usual = {"shapes": MAIN, "context": str(MAIN_CONTEXT)}
    found = keys.str.extract(KEY).fillna(usual).join(keys).join(measured)
    found = found.astype({"requests": int, "context": int})
    found["drawn"] *= found["requests"]
    found["steady"] = found["steady"].fillna(found["drawn"])
    found["side"] = found["runner"].where(found["runner"] == OURS, VLLM)
    found["mode"] = pd.Categorical(found["mode"], list(MODES), ordered=True)
    return found


def _measured(point: dict[str, Any]) -> dict[str, Any]:
    rounds = pd.DataFrame(point["repeats"], columns=MEASURED)
    middle, speeds = rounds.astype(float).median(), rounds["tokens_per_s"]
    steps = (rounds["tokens_per_step"] / rounds["mean_step_s"]).astype(float)
    return {
        "tokens/s": middle["tokens_per_s"],
        "± %": 50 * (speeds.max() - speeds.min()) / speeds.median(),
        "steady": middle["expected_tokens_per_s"],
        "drawn": steps.median(),
        "step": 1e3 * middle["step_s"],
        "draft": 1e3 * middle["draft_s"],
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
    ordered = found.sort_values("tokens/s").groupby(["side", *place], observed=True)
    best = ordered[["tokens/s", "setting"]].last().unstack("side")
    best.columns = [f"{side}: {name}" for name, side in best.columns]
    return best.assign(ratio=best[f"{OURS}: tokens/s"] / best[f"{VLLM}: tokens/s"])


def starts(results: files.Results) -> pd.DataFrame:
    """Start-up time and memory of engines, and the FULL CUDA graphs they captured."""
    engines = pd.DataFrame.from_dict(results.get("engines", {}), orient="index")
    found = engines.reindex(columns=[*STARTS]).rename(columns=STARTS)
    found["reserved, GiB"] /= 1 << 30
    return found.rename_axis("engine").sort_index().dropna(axis=1, how="all")


def sections(results: files.Results) -> Iterator[tuple[str, pd.DataFrame]]:
    """Titles and tables of a results file."""
    found = points(results)
    is_main = (found["shapes"] == MAIN) & (found["acceptance"] == EQUAL)
    if found[is_main]["side"].nunique() == 2:
        title = "each mode at its best K, tokens/s, equal acceptance length"
        yield title, beside(found[is_main], PLACE[2:])
    yield "what starting takes", starts(results)
    order = [*PLACE[:3], "context", "requests", "setting", "runner"]
    every = compare(found).drop(columns=["point", "side"])
    yield "all points (tokens/s; times in ms)", every.set_index(order).sort_index()


def markdown(table: pd.DataFrame) -> str:
    """A table with its index as the first columns."""
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
        f"## `{name}.json`: {title}\n\n{markdown(table)}"
        for name, results in found.items()
        # Else it is of another program.
        if any("repeats" in p for p in results.get("measurements", {}).values())
        for title, table in sections(results)
    ]
    if not parts:
        return ""
    head = [f"# {folder.name}", "Last measured by:"]
    for name, results in found.items():
        if about := results.get("about"):  # put together from several runs
            head.append(f"- `{name}.json`: {about}")
        elif runs := results.get("runs"):
            last = max(runs)
            command = runs[last].get("command", "")
            head.append(f"- `{name}.json`, {last[:10]}: `{command}`")
    return "\n\n".join([*head, *parts]) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=files.RESULTS)
    args = parser.parse_args(arguments)
    for folder in sorted(path for path in args.results.iterdir() if path.is_dir()):
        if text := report(folder):
            (folder / "report.md").write_text(text)


if __name__ == "__main__":
    main()
