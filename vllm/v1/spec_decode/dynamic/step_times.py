# SPDX-License-Identifier: Apache-2.0
"""Interpolates step times between the measured numbers of requests and contexts.

Attention reads the whole context of a request, so a step takes longer with longer
contexts, and more so the more tokens it verifies.
"""

from bisect import bisect_left
from math import log

# Seconds of a step by draft length.
Row = dict[int, float]
# By context in tokens of each request, then by number of requests. The shortest context
# has all draft lengths and sizes, longer ones have a few of both.
PassTimes = dict[int, dict[int, Row]]
# Seconds of a step that verifies only part of its drafts: by drafts made for each
# request, by number of requests, and by mean number of drafts verified of each. All of
# them stand for all but one of the batch.
TrimmedTimes = dict[int, dict[int, dict[float, float]]]

# Resolution of the context: those in the same step get the same times.
STEPS_PER_DOUBLING = 4


class StepTimes:
    """Seconds of a step for any number of requests and any mean context.

    Args:
        measured: see `PassTimes`; empty if nothing was measured.
    """

    def __init__(self, measured: PassTimes):
        self.measured = measured
        self._shortest = min(measured, default=0)
        self._rows: dict[tuple[int, int], Row] = {}
        self._slopes = {
            context: {n: self._slope(context, n, row) for n, row in by_size.items()}
            for context, by_size in measured.items()
            if context > self._shortest
        }

    def __bool__(self) -> bool:
        return bool(self.measured)

    def seconds(self, num_reqs: int, context: float) -> Row:
        """Seconds of a step by draft length.

        Args:
            num_reqs: requests in the step.
            context: mean tokens of a request so far.
        """
        bucket = round(STEPS_PER_DOUBLING * log(max(context, self._shortest, 1), 2))
        row = self._rows.get((num_reqs, bucket))
        if row is None:
            longer = 2 ** (bucket / STEPS_PER_DOUBLING) - self._shortest
            row = self._add_context(self._without_context(num_reqs), num_reqs, longer)
            self._rows[num_reqs, bucket] = row
        return row

    def _without_context(self, n: int) -> Row:
        """Seconds of a step by draft length, at the shortest context."""
        times = self.measured[self._shortest]
        sizes = sorted(times)
        after = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        if n in times or not after:
            return times.get(n, times[sizes[0]])
        # Up to two sizes on each side.
        around = sizes[max(after - 2, 0) : after + 2]
        at = after - max(after - 2, 0)
        return {
            k: between([(m, times[m][k]) for m in around], at, n)
            for k in times[sizes[0]]
        }

    def _slope(self, context: int, n: int, row: Row) -> Row:
        """Seconds that a token of context adds to a step, by draft length."""
        short = self._without_context(n)
        tokens = n * (context - self._shortest)
        added = [(k, max(0.0, row[k] - short[k]) / tokens) for k in sorted(row)]
        return {k: on_line(added, k) for k in short}

    def _add_context(self, row: Row, n: int, longer: float) -> Row:
        if longer <= 0 or not self._slopes:
            return row

        def slope(k: int) -> float:
            by_context = [
                (log(context), on_line([(log(m), s[k]) for m, s in by_size], log(n)))
                for context, by_size in sorted_items(self._slopes)
            ]
            return on_line(by_context, log(self._shortest + longer))

        return {k: seconds + slope(k) * n * longer for k, seconds in row.items()}


def sorted_items(
    slopes: dict[int, dict[int, Row]],
) -> list[tuple[int, list[tuple[int, Row]]]]:
    return [(context, sorted(slopes[context].items())) for context in sorted(slopes)]


def on_line(points: list[tuple[float, float]], x: float) -> float:
    """Linear interpolation at x; beyond an end, the value of that end."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (x1, y1), (x2, y2) = points[at - 1 : at + 1]
    return y1 + (y2 - y1) * (x - x1) / (x2 - x1)


def between(points: list[tuple[int, float]], at: int, n: int) -> float:
    """Seconds for n requests, which are fewer than in points[at], or more than in all.

    Times are flat while memory-bound and rise once compute-bound: a convex curve. The
    chord between the two points lies above it, and the extended lines of the
    neighbouring points below it; the result is halfway between.
    """

    def line(i: int) -> float:
        (n1, t1), (n2, t2) = points[i : i + 2]
        return t1 + (n - n1) / (n2 - n1) * max(0.0, t2 - t1)  # a fall is noise

    chord, before, behind = line(at - 1), points[at - 1][1], 0.0
    if n > points[at][0]:
        return chord
    if at >= 2:
        before = line(at - 2)
    if at + 1 < len(points):
        behind = line(at)
    return (chord + min(chord, max(before, behind))) / 2
