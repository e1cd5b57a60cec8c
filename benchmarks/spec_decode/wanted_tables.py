# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of what was wanted and what was reached."""

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.shapes import MODES
from benchmarks.spec_decode.tables import NAMES, Cell, percent, table, times
from benchmarks.spec_decode.wanted import Figure, Point, figures

HEAD = ("figure", "wanted", "points met", "least", "where", "most")
UNMET_HEAD = (
    "not met",
    "where",
    "wanted",
    "reached",
    "at most, by steps",
    "if there were",
)


def wanted_text(results: files.Results, inputs: files.Results) -> str:
    """Each figure in a row, then every point that was not met."""
    found = [figure for figure in figures(results, inputs) if figure.points]
    summary = table(HEAD, [_summary(figure) for figure in found])
    unmet = [
        _unmet(figure, point)
        for figure in found
        for point in figure.points
        if not point.is_met
    ]
    return "\n".join(filter(None, (summary, table(UNMET_HEAD, unmet))))


def _summary(figure: Figure) -> list[Cell]:
    points = figure.points
    least = min(points, key=lambda point: point.reached / point.wanted)
    most = max(point.reached for point in points)
    wanted = sorted({point.wanted for point in points})
    if len(wanted) > 3:
        wanted = [wanted[0], wanted[-1]]
    between = " to " if len({p.wanted for p in points}) > 3 else " or "
    return [
        figure.title,
        between.join(_value(figure, one) for one in wanted),
        f"{sum(point.is_met for point in points)} of {len(points)}",
        _value(figure, least.reached),
        _place(least),
        _value(figure, most),
    ]


def _unmet(figure: Figure, point: Point) -> list[Cell]:
    bound = point.bound
    return [
        figure.title,
        _place(point),
        _value(figure, point.wanted),
        _value(figure, point.reached),
        None if bound is None else _value(figure, bound),
        figure.bounded_by if bound is not None else None,
    ]


def _value(figure: Figure, value: float) -> str:
    return percent(value) if figure.unit == "%" else times(value)


def _place(point: Point) -> str:
    """Modes by the names they have in tables."""
    mode, comma, rest = point.where.partition(",")
    return f"{NAMES[mode]},{rest}" if mode in MODES and comma else point.where
