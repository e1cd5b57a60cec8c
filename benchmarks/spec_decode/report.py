# SPDX-License-Identifier: Apache-2.0
"""Writes `report.md` beside the results of each device: tables of all points."""

import argparse
from collections.abc import Iterator
from functools import partial
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
}
PLACE = ["shapes", "acceptance", "mode", "context", "requests"]
VLLM = "vLLM"  # the faster of the release's runners at a point
PROFILED = (
    "device_kernels",
    "kernel_launches",
    "graph_launches",
    "copies",
    "device_to_host",
    "synchronisations",
)


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


def profiles(results: files.Results, found: pd.DataFrame) -> pd.DataFrame:
    """What a step consists of. The profiler slows the host down, so the step time is
    that of the same run without it."""
    rows = []
    steps = found.set_index("point")[["step", "run"]].to_dict("index")
    for text, profile in sorted(results.get("profiles", {}).items()):
        step, busy = steps.get(text, {}), profile.get("busy_share")
        row = {"point": text, "kernels run": busy and busy * profile["step_s"] * 1e3}
        if busy and step.get("run") == profile["run"][:16] and step["step"]:
            row["step"] = step["step"]
            row["GPU busy"] = row["kernels run"] / step["step"]
        rows.append(row | {name: profile.get(name) for name in PROFILED})
    return pd.DataFrame(rows).set_index("point") if rows else pd.DataFrame()


def kernels(results: files.Results) -> pd.DataFrame:
    """µs per step in each Triton kernel: the parts of drafting."""
    rows = {
        point: {n: s * 1e6 for n, s in profile["kernels"].items() if n[0] == "_"}
        for point, profile in sorted(results.get("profiles", {}).items())
        if "kernels" in profile
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("point")


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


def settings(results: files.Results, value: str = "steady") -> pd.DataFrame:
    """Steady tokens/s of settings side by side, by mode and requests.

    Without adaptive verification, for which only `drawn` is known.
    """
    found = points(results)
    if found.empty:
        return found
    if value == "steady":
        found = found[~found["setting"].str.contains("adaptive")]
    is_ours, setting = found["side"] == OURS, found["setting"]
    found["setting"] = setting.where(is_ours, f"{VLLM} " + setting)
    place = ["mode", "context", "requests"]
    return found.pivot(index=place, columns="setting", values=value)


def serving(results: files.Results) -> pd.DataFrame:
    """Points of `vllm bench serve`, with ratios to vLLM at the same rate."""
    found = pd.DataFrame.from_dict(results.get("measurements", {}), orient="index")
    found = found.rename_axis("point").sort_index().drop(columns="run", errors="ignore")
    if found.empty:
        return found
    parts = found.index.str.extract(r"^(?P<side>[^/]+)/([^/]+)/[^/]+(/.*)$")
    parts.index = found.index
    side, *load = (parts[name] for name in parts)
    for name, best in (("output_throughput", "max"), ("median_tpot_ms", "min")):
        other = found[name].where(side != OURS).groupby(load).transform(best)
        found[f"{name} to vLLM's"] = (found[name] / other).mask(side != OURS)
    return found


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


def engine_sections(results: files.Results) -> Iterator[tuple[str, str]]:
    """Titles and tables of engine.json."""
    found = points(results)
    if found.empty:
        return
    is_main = (found["shapes"] == MAIN) & (found["acceptance"] == EQUAL)
    best = beside(found[is_main], PLACE[2:])
    yield "Each mode at its best K, tokens/s, equal acceptance length", markdown(best)
    yield "Where the time of a step goes", markdown(profiles(results, found))
    yield "Triton's kernels in a step (µs)", markdown(kernels(results))
    yield "What starting takes", markdown(starts(results))
    order = [*PLACE[:3], "context", "requests", "setting", "runner"]
    every = compare(found).set_index(order).sort_index()
    shown = every.drop(columns=["point", "side", "drawn"])
    yield "All points (tokens/s; times in ms)", markdown(shown)


drawn = partial(settings, value="drawn")
OTHERS = {
    "auto": ('"auto" beside what it chooses among, in one run (tokens/s)', settings),
    "auto-all": ('"auto" with every drafter, in one run (tokens/s)', settings),
    "trimming": (
        "Verifying the likeliest drafts, as rounds had drafts accepted (tokens/s)",
        drawn,
    ),
    "contexts": ("Chains and trees in long contexts (tokens/s)", settings),
    "float32": ("In float32 (tokens/s)", settings),
    "gpt-oss-20b": ("gpt-oss-20b (tokens/s)", settings),
    "qwen3-8b": ("Qwen3-8B (tokens/s)", settings),
    "qwen3-next": ("Qwen3-Next-80B, 8 of 48 layers (tokens/s)", settings),
    "trees": (
        "Trees and chains of autoregressive drafters, and vLLM's chains (tokens/s)",
        settings,
    ),
    "adaptive": (
        "Adaptive verification beside it, as rounds had drafts accepted (tokens/s)",
        drawn,
    ),
    "fp8": ("Drafters in fp8 beside bfloat16, in one run (tokens/s)", settings),
    "serving": ("`vllm bench serve`", serving),
    "start": ("What starting takes with `max_num_seqs` 1024", starts),
}


def report(folder: Path) -> str:
    """The whole report of one device."""
    sections = list(engine_sections(files.load(folder / "engine.json")))
    for name, (title, table) in OTHERS.items():
        sections.append((title, markdown(table(files.load(folder / f"{name}.json")))))
    parts = [f"# {folder.name}", *_devices(folder)]
    parts += [f"## {title}\n\n{text}" for title, text in sections if text]
    return "\n\n".join(parts) + "\n"


def _devices(folder: Path) -> Iterator[str]:
    """The command and date of each file's last run."""
    yield "Last measured by:"
    for path in sorted(folder.glob("*.json")):
        found = files.load(path)
        if about := found.get("about"):  # put together from several runs
            yield f"- `{path.name}`: {about}"
        elif runs := found.get("runs"):
            last = max(runs)
            yield f"- `{path.name}`, {last[:10]}: `{runs[last].get('command', '')}`"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=files.RESULTS)
    args = parser.parse_args(arguments)
    for folder in sorted(path for path in args.results.iterdir() if path.is_dir()):
        (folder / "report.md").write_text(report(folder))


if __name__ == "__main__":
    main()
