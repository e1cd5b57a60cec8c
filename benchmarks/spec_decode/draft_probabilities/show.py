# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of acceptance lengths by temperature."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.draft_probabilities.mean import gain_error
from benchmarks.spec_decode.tables import NAMES, Cell, table

Point = dict[str, Any]
# Without draft probabilities and with them, by drafter and temperature.
Pairs = dict[tuple[str, float], tuple[Point, Point]]


def pairs(measurements: dict[str, Point]) -> Pairs:
    """Those that were measured both ways, with the same number of drafts."""
    found = {}
    for key, without in measurements.items():
        mode, method, drafts, temperature = key.split("/")
        other = f"{mode}/probabilistic/{drafts}/{temperature}"
        if method == "greedy" and other in measurements:
            found[mode, float(temperature[1:])] = without, measurements[other]
    return {at: found[at] for at in sorted(found)}


def cells(mode: str, temperature: float, without: Point, given: Point) -> list[Cell]:
    gain = given["acceptance_length"] - without["acceptance_length"]
    error = gain_error(without["counts"], given["counts"])
    lengths = (
        f"{point['acceptance_length']:.2f} ± {point['standard_error']:.2f}"
        for point in (without, given)
    )
    return [NAMES[mode], temperature, *lengths, f"{gain:+.2f} ± {error:.2f}"]


def probability_table(measurements: dict[str, Point]) -> str:
    head = ["drafter", "temperature", "without", "with", "gain"]
    rows = [cells(*at, *points) for at, points in pairs(measurements).items()]
    return table(head, rows)


def draw(measurements: dict[str, Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    found = pairs(measurements)
    for number, mode in enumerate(dict.fromkeys(mode for mode, _ in found)):
        at = {t: points for (name, t), points in found.items() if name == mode}
        for side, line, label in ((0, ":", None), (1, "-", NAMES[mode])):
            axes.errorbar(
                list(at),
                [points[side]["acceptance_length"] for points in at.values()],
                [points[side]["standard_error"] for points in at.values()],
                fmt=line,
                marker=".",
                color=f"C{number}",
                label=label,
            )
    axes.set(title="With draft probabilities (dotted: without)")
    axes.set(xlabel="temperature", ylabel="acceptance length")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the date, equal points make an equal file.
    figure.savefig(path, dpi=120, metadata={"Software": None})


def probability_text(folder: Path, docs: Path) -> Iterator[str]:
    """A section of the report for one device, if it was measured there."""
    results = files.load(folder / "draft_probabilities.json")
    measurements = results.get("measurements", {})
    if not pairs(measurements):
        return
    plot = docs / "images" / f"{folder.name}-draft-probabilities.png"
    draw(measurements, plot)
    yield (
        "### Draft probabilities\n\nAcceptance length of the bundled drafters on "
        "held-out prompts, without draft probabilities and with them; ± is the "
        "standard error over requests, that of the gain over the same prompts."
    )
    yield f"![draft probabilities]({plot.relative_to(docs)})"
    yield probability_table(measurements)
