# SPDX-License-Identifier: Apache-2.0
"""PNG plots of engine results."""

import contextlib
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.compare import BASE, Comparison, DraftLengths, ratio
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL
from benchmarks.spec_decode.results import OURS
from benchmarks.spec_decode.shapes import MODES
from benchmarks.spec_decode.tables import NAMES

DRAFTING = [mode for mode in MODES if mode != "none"]


def draw_all(compared: Comparison, folder: Path, gpu: str) -> list[Path]:
    """Writes every plot there are points for; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, draw in (
        ("ratio", draw_ratio),
        ("envelope", draw_envelope),
        ("step", draw_step),
        ("draft-length", draw_draft_length),
    ):
        figure = draw(compared)
        if figure is not None:
            made.append(folder / f"{gpu}-{name}.png")
            # Without the date, equal points make an equal file.
            figure.savefig(made[-1], dpi=120, metadata={"Software": None})
    return made


def _axes(title: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, ylabel=y, xlabel="concurrent requests")
    axes.grid(alpha=0.3)
    return figure, axes


def _by_request(axes: Any, concurrencies: set[int]) -> None:
    ticks = sorted(concurrencies)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.legend()


def draw_ratio(compared: Comparison) -> Any | None:
    """Tokens per second over those of the base's best, each at its best K."""
    figure, axes = _axes("Ours over the base's best runner", "ratio of tokens/s")
    shown: set[int] = set()
    for mode in MODES:
        points = {}
        for c in compared.values(mode, EQUAL)[1]:
            pair = [compared.best_k(name, mode, EQUAL, c) for name in (OURS, BASE)]
            if (found := ratio(*pair)) is not None:
                points[c] = found
        if points:
            axes.plot(points.keys(), points.values(), marker="o", label=NAMES[mode])
            shown |= points.keys()
    if not shown:
        return None
    axes.axhline(1, color="black", linewidth=0.8)
    _by_request(axes, shown)
    return figure


def draw_envelope(compared: Comparison) -> Any | None:
    """Tokens per second of each mode at its best K."""
    figure, axes = _axes("Each mode at its best K (dashed: base)", "tokens/s")
    shown: set[int] = set()
    for number, mode in enumerate(MODES):
        for name, line in ((OURS, "-"), (BASE, "--")):
            rows = {
                c: compared.best_k(name, mode, EQUAL, c)
                for c in compared.values(mode, EQUAL)[1]
            }
            points = {c: row.tokens_per_s.median for c, row in rows.items() if row}
            label = NAMES[mode] if name == OURS else None
            axes.plot(
                points.keys(), points.values(), line, color=f"C{number}", label=label
            )
            shown |= points.keys()
    if not shown:
        return None
    axes.set_yscale("log")
    _by_request(axes, shown)
    return figure


def draw_draft_length(compared: Comparison) -> Any | None:
    """Speed of each fixed K over that of the best one, and of "auto"."""
    from matplotlib.figure import Figure

    rows = {
        mode: found for mode in DRAFTING if (found := _by_concurrency(compared, mode))
    }
    if not rows:
        return None
    figure = Figure(figsize=(7, 2.1 + 1.5 * len(rows)), layout="constrained")
    for axes, (mode, points) in zip(
        figure.subplots(len(rows), squeeze=False)[:, 0], rows.items(), strict=True
    ):
        for k in sorted({k for found in points.values() for k in found.fixed}):
            line = {
                c: found.fixed[k] / found.best
                for c, found in points.items()
                if k in found.fixed
            }
            axes.plot(line.keys(), line.values(), linewidth=1, label=f"K={k}")
        auto = {c: found.share for c, found in points.items()}
        axes.plot(auto.keys(), auto.values(), "k-o", markersize=4, label="auto")
        axes.set(title=NAMES[mode], ylabel="of the best fixed K")
        axes.grid(alpha=0.3)
        _by_request(axes, set(points))
        axes.get_legend().remove()
    axes.set_xlabel("concurrent requests")
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=5
    )
    return figure


def _by_concurrency(compared: Comparison, mode: str) -> dict[int, DraftLengths]:
    points = {}
    for concurrency in compared.values(mode, BY_POSITION)[1]:
        with contextlib.suppress(LookupError):
            points[concurrency] = compared.by_draft_length(mode, concurrency)
    return points


def draw_step(compared: Comparison) -> Any | None:
    """A step of the fewest requests, split, at each mode's best K."""
    bars = []
    for mode in MODES:
        concurrencies = compared.values(mode, EQUAL)[1]
        for name in (OURS, BASE):
            row = concurrencies and compared.best_k(name, mode, EQUAL, concurrencies[0])
            if row and row.step_s:
                bars.append((f"{NAMES[mode]}\n{row.key.engine.implementation}", row))
    if not bars:
        return None
    figure, axes = _axes("A step with the fewest requests, best K", "ms")
    labels = [label for label, _ in bars]
    target = [row.target_s * 1e3 for _, row in bars]
    draft = [(row.draft_s or 0) * 1e3 for _, row in bars]
    axes.bar(labels, target, label="target and the rest")
    axes.bar(labels, draft, bottom=target, label="draft")
    axes.tick_params(axis="x", labelrotation=60, labelsize=7)
    axes.set_xlabel("")
    axes.legend()
    return figure
