# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs from recorded results.

Comparisons use the best K of each side at each point, at equal acceptance lengths.
"""

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import MAIN, ROOT
from benchmarks.spec_decode.report import NAMES, VLLM, beside, points
from benchmarks.spec_decode.traces import EQUAL

MODES = ("none", "draft", "pard", "eagle3", "peagle")
SIDES = {VLLM: ("vLLM 0.33.0", "#b5bdc8"), "ours": ("this tree", "#2f6fd0")}


def best_speeds(results: files.Results) -> pd.DataFrame:
    """Tokens per second of this tree and vLLM, and the ratio, by mode and requests."""
    found = points(results)
    main = found[(found["shapes"] == MAIN) & (found["acceptance"] == EQUAL)]
    return beside(main, ["mode", "requests"])


def draw_one_request(best: pd.DataFrame) -> Figure:
    """Bars for each mode: vLLM's faster runner, and this tree."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    alone = best.xs(1, level="requests").loc[list(MODES)]
    plain = alone.loc["none", "ours: tokens/s"]
    for at, (side, (label, colour)) in enumerate(SIDES.items()):
        places = [place + 0.4 * at - 0.2 for place in range(len(MODES))]
        heights = alone[f"{side}: tokens/s"]
        bars = axes.bar(places, heights, width=0.38, color=colour, label=label)
        texts = [f"{height:.0f}\n{height / plain:.1f}×" for height in heights]
        axes.bar_label(bars, texts, fontsize=8)
    axes.set_xticks(range(len(MODES)), [NAMES[mode] for mode in MODES])
    axes.set(ylabel="tokens/s", title="One request, Llama-3.1-8B shapes, one H100")
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def draw_ratio(best: pd.DataFrame) -> Figure:
    """Tokens per second over vLLM's faster runner, by requests."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for mode in MODES[1:]:
        ratio = best.loc[mode, "ratio"].dropna()
        axes.plot(ratio.index, ratio, marker="o", label=NAMES[mode])
    loads = sorted(best.index.unique("requests"))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, map(str, loads))
    axes.set(xlabel="concurrent requests", ylabel="tokens/s over vLLM 0.33.0's")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results = files.RESULTS / "nvidia-h100-80gb-hbm3/engine.json"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images")
    args = parser.parse_args(arguments)
    best = best_speeds(files.load(args.results))
    figures = {"one-request": draw_one_request(best), "ratio": draw_ratio(best)}
    for name, figure in figures.items():
        file = args.images / f"{name}.png"
        # Without metadata, equal results give identical files.
        figure.savefig(file, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
