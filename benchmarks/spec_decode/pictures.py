# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs from recorded results."""

import argparse
import json
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.spec_decode import contract
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import ROOT
from benchmarks.spec_decode.report import NAMES, VLLM, points
from benchmarks.spec_decode.traces import RECORDED

MODES = ["eagle3", "dflash", "dflash2", "dspark"]
SHADES = {"vLLM 0.33.0, best K": "#b5bdc8", 'AnyDraft, "auto"': "#2f6fd0"}
# Of a drafter's lines, by how it drafts.
STYLES = {"": "-", "draft probabilities": ":", "tree of 31": "--"}


def draw_one_request(results: files.Results) -> Figure:
    """Steady tokens per second of each drafter: vLLM at its best K, and "auto"."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes, found = figure.subplots(), points(results)
    one = found["acceptance"].str.startswith(RECORDED) & (found["requests"] == 1)
    rows = found[one & found["mode"].isin(MODES)]
    chosen = rows["setting"].str.endswith("auto")
    sides = [rows[rows["side"] == VLLM], rows[chosen]]
    theirs, ours = (side.groupby("mode")["steady"].max().loc[MODES] for side in sides)
    for at, (label, colour) in enumerate(SHADES.items()):
        places = [place + 0.4 * at - 0.2 for place in range(len(MODES))]
        heights = (theirs, ours)[at]
        bars = axes.bar(places, heights, width=0.38, color=colour, label=label)
        texts = [f"{height:.0f}" for height in heights]
        if at:
            texts = [f"{ours[m]:.0f}\n{ours[m] / theirs[m]:.2f}×" for m in MODES]
        axes.bar_label(bars, texts, fontsize=8)
    axes.set_xticks(range(len(MODES)), [NAMES[mode] for mode in MODES])
    axes.set(ylabel="tokens/s", title="One request, shapes of 8B models, one H100")
    axes.margins(y=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, ncols=2)
    return figure


def draw_contract(shares: pd.DataFrame) -> Figure:
    """What greedy steps accept by position, and tokens a step by temperature."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    places, heats = figure.subplots(1, 2)
    greedy = shares.xs((contract.GREEDY, "all"), level=contract.POINT[1:])
    lengths = contract.by_temperature(shares).rename(columns=float)
    for axes, table in (places, greedy), (heats, lengths):
        names = table.index.str.partition(", ")
        drafters = [*dict.fromkeys(names.get_level_values(0))]
        for (drafter, _, how), (_, row) in zip(names, table.iterrows(), strict=True):
            if how in STYLES:
                shown, colour = row.dropna(), f"C{drafters.index(drafter)}"
                axes.plot(shown.index, shown, STYLES[how], color=colour, marker=".")
        axes.grid(alpha=0.3)
    places.set(xlabel="position of the draft", ylabel="share of greedy steps")
    heats.set(xlabel="temperature", ylabel="tokens a step")
    lines = [Line2D([], [], color=f"C{n}", label=d) for n, d in enumerate(drafters)]
    for how, style in STYLES.items():
        lines += [Line2D([], [], color="black", linestyle=style, label=how or "chain")]
    figure.legend(handles=lines, loc="outside right center", frameon=False)
    return figure


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    results = files.RESULTS / "nvidia-h100-80gb-hbm3/engine.json"
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images")
    parser.add_argument("--contract", type=Path, default=contract.STORED)
    args = parser.parse_args(arguments)
    points = json.loads(args.contract.read_text())["points"]
    figures = {
        "one-request": draw_one_request(files.load(args.results)),
        "contract": draw_contract(contract.accepted(points)),
    }
    for name, figure in figures.items():
        file = args.images / f"{name}.png"
        # Without metadata, equal results give identical files.
        figure.savefig(file, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
