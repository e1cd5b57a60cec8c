# SPDX-License-Identifier: Apache-2.0
"""Writes `report.md` beside the results of each device: tables of all points."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL, RECORDED
from benchmarks.spec_decode.results import MAIN_SHAPES, OURS, PointKey
from benchmarks.spec_decode.shapes import MODES, PARALLEL

NAMES = {
    "none": "no speculation",
    "draft": "draft model",
    "pard": "PARD",
    "pard2": "PARD-2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
}
PLACE = ["mode", "context", "requests"]
VLLM = "vLLM"  # whichever of the release's runners is the faster at a point
PROFILED = (
    "device_kernels",
    "draft_kernels",
    "kernel_launches",
    "graph_launches",
    "copies",
    "device_to_host",
    "synchronisations",
)


def points(results: files.Results) -> pd.DataFrame:
    """A row for each measured point: medians over its repeats, times in ms.

    `steady` is tokens/s of steady decode had acceptance been just its mean, which does
    not vary by what a round happened to accept; as it was where that mean is not known.
    """
    rows = [_point(results, *item) for item in results.get("measurements", {}).items()]
    found = pd.DataFrame(rows)
    if rows:
        found["mode"] = pd.Categorical(found["mode"], list(MODES), ordered=True)
    return found


def _point(results: files.Results, text: str, point: dict[str, Any]) -> dict[str, Any]:
    key, repeats = PointKey.parse(text), point["repeats"]

    def value(name: str, scale: float = 1.0) -> float | None:
        known = [r[name] for r in repeats if r.get(name) is not None]
        return median(known) * scale if known else None

    speeds = [repeat["tokens_per_s"] for repeat in repeats]
    engine, steady = key.engine, value("expected_tokens_per_s")
    if steady is None and (step_s := value("mean_step_s")):
        steady = key.concurrency * value("tokens_per_step") / step_s
    return {
        "point": text,
        "side": OURS if engine.implementation == OURS else VLLM,
        "runner": engine.implementation,
        "mode": engine.mode,
        "setting": engine.setting,
        "K": engine.num_tokens,
        "shapes": engine.shapes,
        "acceptance": key.acceptance,
        "context": key.context,
        "requests": key.concurrency,
        "tokens/s": median(speeds),
        "± %": 50 * (max(speeds) - min(speeds)) / median(speeds),
        "steady": steady,
        "step": value("step_s", 1e3),
        "draft": value("draft_s", 1e3),
        "TPOT": value("tpot_s", 1e3),
        "prefill": value("prefill_s", 1e3),
        "of the floor": floor_share(results, key, value("step_s")),
        "run": point["run"],
    }


def floor_share(
    results: files.Results, key: PointKey, step_s: float | None
) -> float | None:
    """Share of a step that reading all weights once per pass is: 1 is the fastest."""
    engine = results.get("engines", {}).get(str(key.engine))
    if not (engine and step_s) or engine.get("target_bytes") is None:
        return None
    k = key.engine.num_tokens
    passes = min(k, 1) if key.engine.mode in PARALLEL else k
    read = engine["target_bytes"] + passes * engine["draft_bytes"]
    device = results["runs"][engine["run"]]["device"]
    return read / device["copy_bytes_per_s"] / step_s


def fastest(found: pd.DataFrame, place: list[str], column: str) -> pd.DataFrame:
    """The rows that are the fastest at each place."""
    known = found.dropna(subset=column)
    return known.loc[known.groupby(place, observed=True)[column].idxmax()]


def beside(found: pd.DataFrame, place: list[str], shown: list[str]) -> pd.DataFrame:
    """Ours and the release's faster runner, by place, with the ratios of the two."""
    both = {
        side: fastest(found[found["side"] == side], place, "tokens/s").set_index(place)
        for side in (OURS, VLLM)
    }
    ours, other = both[OURS], both[VLLM]
    columns = {"ours": ours["tokens/s"], "± %": ours["± %"]}
    columns |= {f"ours: {name}": ours[name] for name in shown}
    columns |= {VLLM: other["tokens/s"], "vLLM: runner": other["runner"]}
    columns |= {f"{VLLM}: {name}": other[name] for name in shown}
    columns["ratio"] = ours["tokens/s"] / other["tokens/s"]
    columns["ratio of steps"] = other["step"] / ours["step"]
    return pd.DataFrame(columns).sort_index()


def by_setting(found: pd.DataFrame) -> pd.DataFrame:
    """Steady tokens/s of ours at each setting, and how the best of them compares."""
    drafted = found[found["mode"] != "none"].sort_values(["K", "setting"])
    ours = drafted[drafted["side"] == OURS]
    table = ours.pivot_table(
        "steady", PLACE, "setting", sort=False, observed=True
    ).sort_index()
    chains = [name for name in table if name in {f"K{k}" for k in ours["K"]}]
    best, best_chain = table.max(axis=1), table[chains].max(axis=1)
    for name in [name for name in table if name not in chains]:
        table[f"{name} to the best chain"] = table[name] / best_chain
    other = drafted[drafted["side"] == VLLM].groupby(PLACE, observed=True)
    table["best to vLLM's best"] = best / other["steady"].max()
    alone = found[found["mode"] == "none"].groupby(PLACE[1:])["steady"].max()
    places = table.index.droplevel("mode")
    table["best to no speculation"] = best / alone.reindex(places).to_numpy()
    return table.dropna(axis=1, how="all")


def profiles(results: files.Results, found: pd.DataFrame) -> pd.DataFrame:
    """What a step consists of. The profiler makes the host slower, so a step's duration
    is that of the same run without it."""
    rows = []
    steps = found.set_index("point")[["step", "run"]].to_dict("index")
    for text, profile in sorted(results.get("profiles", {}).items()):
        step = steps.get(text, {})
        busy = profile.get("busy_share")
        row = {"point": text, "kernels run": busy and busy * profile["step_s"] * 1e3}
        if busy and step.get("run") == profile["run"] and step["step"]:
            row |= {
                "step": step["step"],
                "GPU busy": row["kernels run"] / step["step"],
            }
        rows.append(row | {name: profile.get(name) for name in PROFILED})
    return pd.DataFrame(rows).set_index("point") if rows else pd.DataFrame()


def captures(results: files.Results) -> pd.DataFrame:
    """Seconds and GiB that recording CUDA graphs took, and the drafter's part."""
    rows = {}
    for name, engine in sorted(results.get("engines", {}).items()):
        parts = engine.get("graph_capture", {})
        rows[name] = {
            f"{what}, {unit}": part[key] / scale
            for what, part in parts.items()
            for unit, key, scale in (("s", "s", 1), ("GiB", "reserved_bytes", 1 << 30))
            if key in part
        } | {"start, s": engine.get("start_s")}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("engine")


def flat(results: files.Results) -> pd.DataFrame:
    """What another benchmark measured: its points by key."""
    rows = results.get("measurements", {})
    found = pd.DataFrame.from_dict(rows, orient="index").rename_axis("point")
    return found.drop(columns="run", errors="ignore").sort_index()


def markdown(table: pd.DataFrame) -> str:
    """A table with its index as the first columns; nothing without rows."""
    if table.empty:
        return ""
    table = table.reset_index()
    if "mode" in table:
        table["mode"] = table["mode"].map(NAMES)
    big = [
        name
        for name in table.select_dtypes("number")
        if not name.startswith("±") and table[name].max() >= 100
    ]
    table[big] = table[big].round().astype("Int64")
    table = table.astype(object).where(table.notna(), "–")
    return table.to_markdown(index=False, floatfmt=".3g")


def engine_sections(results: files.Results) -> Iterator[tuple[str, str]]:
    """Title and table of all that engine.json has."""
    found = points(results)
    if found.empty:
        return
    main = found[found["shapes"] == MAIN_SHAPES]
    equal = main[main["acceptance"] == EQUAL]
    best = beside(equal, PLACE, ["setting"])
    yield "Each mode at its best K, tokens/s", markdown(best)
    for label in (*RECORDED, BY_POSITION):
        drafted = main["acceptance"] == label
        alone = (main["acceptance"] == EQUAL) & (main["mode"] == "none")
        if drafted.any():
            title = f"Tokens/s of steady decode by setting, acceptance {label}"
            yield title, markdown(by_setting(main[drafted | alone]))
    shown = ["step", "draft", "TPOT", "prefill", "of the floor"]
    every = beside(equal, ["mode", "K", *PLACE[1:]], shown)
    yield "All points, equal acceptance length (times in ms)", markdown(every)
    for shapes, part in found[found["shapes"] != MAIN_SHAPES].groupby("shapes"):
        shown = part.set_index(["mode", "setting", *PLACE[1:]])
        shown = shown[["tokens/s", "± %", "step", "draft", "TPOT"]]
        yield f"Shapes of {shapes}", markdown(shown.sort_index())
    yield (
        "Where the time of a step goes (ms, and counts)",
        markdown(profiles(results, main)),
    )
    yield "What recording CUDA graphs takes", markdown(captures(results))


OTHERS = {
    "serving": "`vllm bench serve`",
    "draft-tree": "What each part of a draft tree costs",
    "prepare_inputs": "Input preparation",
}


def report(folder: Path) -> str:
    """All of it, for one device."""
    results = files.load(folder / "engine.json")
    sections = list(engine_sections(results))
    for name, title in OTHERS.items():
        sections.append((title, markdown(flat(files.load(folder / f"{name}.json")))))
    parts = [f"# {folder.name}", *_devices(folder)]
    parts += [f"## {title}\n\n{text}" for title, text in sections if text]
    return "\n\n".join(parts) + "\n"


def _devices(folder: Path) -> Iterator[str]:
    """By what each file was made, and when."""
    lines = []
    for path in sorted(folder.glob("*.json")):
        if runs := files.load(path).get("runs"):
            last = max(runs)
            command = runs[last].get("command", "")
            lines.append(f"- `{path.name}`, {last[:10]}: `{command}`")
    if lines:
        yield "Last measured by\n\n" + "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.report", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=files.RESULTS)
    args = parser.parse_args(arguments)
    for folder in sorted(path for path in args.results.iterdir() if path.is_dir()):
        (folder / "report.md").write_text(report(folder))


if __name__ == "__main__":
    main()
