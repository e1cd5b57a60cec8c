# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and docs/performance.md from recorded results.

    python -m benchmarks.spec_decode.pictures

Each side is at its best K at each point, at equal acceptance lengths.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/nvidia-h200/engine.json"
IMAGES = ROOT / "docs/images"
VLLM, OURS = ("base-v1", "base-v2"), ("ours",)
MODES = {
    "none": "no speculation",
    "draft": "draft model",
    "pard": "PARD",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
}
Speeds = dict[tuple[str, str, int], float]


def speeds(results: dict[str, Any]) -> Speeds:
    """Median tokens per second, at the best K, by implementation, mode, requests."""
    best: Speeds = {}
    for key, point in results["measurements"].items():
        side, mode, _, acceptance, requests = key.split("/")
        if acceptance == "equal":
            at = side, mode, int(requests.removeprefix("c"))
            speed = median(repeat["tokens_per_s"] for repeat in point["repeats"])
            best[at] = max(best.get(at, 0.0), speed)
    return best


def faster(best: Speeds, sides: Iterable[str], mode: str, requests: int) -> float:
    """That of the faster of some implementations; 0 where none was measured."""
    return max(best.get((side, mode, requests), 0.0) for side in sides)


def draw_one_request(best: Speeds) -> Figure:
    """Bars for each mode: vLLM's faster runner, and this tree."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    plain = faster(best, OURS, "none", 1)
    for at, (sides, label) in enumerate(((VLLM, "vLLM 0.32.0"), (OURS, "this tree"))):
        heights = [faster(best, sides, mode, 1) for mode in MODES]
        places = [place + 0.4 * at - 0.2 for place in range(len(MODES))]
        colour = ("#b5bdc8", "#2f6fd0")[at]
        bars = axes.bar(places, heights, width=0.38, color=colour, label=label)
        texts = [f"{height:.0f}\n{height / plain:.1f}×" for height in heights]
        axes.bar_label(bars, texts, fontsize=8)
    axes.set_xticks(range(len(MODES)), MODES.values())
    axes.set(ylabel="tokens/s", title="One request, Llama-3.1-8B shapes, one H200")
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def draw_ratio(best: Speeds) -> Figure:
    """Tokens per second over vLLM's faster runner, by requests."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    loads = sorted({requests for *_, requests in best})
    for mode, label in list(MODES.items())[1:]:
        pairs = {n: [faster(best, s, mode, n) for s in (OURS, VLLM)] for n in loads}
        known = {n: ours / vllm for n, (ours, vllm) in pairs.items() if ours and vllm}
        axes.plot(known.keys(), known.values(), marker="o", label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, map(str, loads))
    axes.set(xlabel="concurrent requests", ylabel="tokens/s over vLLM 0.32.0's")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    best = speeds(json.loads(RESULTS.read_text()))
    for name, draw in (("one-request", draw_one_request), ("ratio", draw_ratio)):
        # Without the date, equal results make an equal file.
        draw(best).savefig(IMAGES / f"{name}.png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
