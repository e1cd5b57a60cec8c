# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step by plan: measured at start, corrected by steps that are served."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping
from math import exp, log, log2

# Seconds of a step by plan.
Row = dict[float, float]
# By number of requests.
Rows = dict[int, Row]
# By context in tokens of each request. The shorter context has all plans and numbers of
# requests, a longer one has a few of both. Plain numbers: it can be kept as JSON.
Table = dict[int, Rows]
# Seconds of a step that verifies only part of its drafts, by number of requests, and by
# mean number of drafts verified of each. All of them stands for all but one of a batch.
Curves = Rows

# The replay is as good without any correction, by 0.2 %: its times at start are off by
# a few per cent only. These are for engines that start on a busy machine.
LEAST_STEPS = 5  # of a plan, before its served times correct those measured at start
SIZES_PER_DOUBLING = 2  # batch sizes that are told apart
# How far the level of all plans follows a step, and over how many steps a plan's
# deviation from it is averaged.
LEVEL_GAIN, MOST_STEPS = 0.25, 64
# Largest difference of one step that counts, as a share: a tenth of all steps include a
# pause of the host.
LARGEST_SURPRISE = 0.15


def plausible(row: Row, depth: int) -> Row:
    """Lowers times of a row that are longer than those of a step that does more.

    Other load makes some steps seem longer, and none shorter. Without this, a plan that
    was timed at a bad moment would never be chosen, and so never be corrected. A tree
    may take fewer passes than a chain, so both are compared with their like only; and
    a step without drafts is never the longer one.

    Args:
        depth: the longest chain; plans above are trees.
    """
    found: Row = {}
    for is_tree in (False, True):
        least = float("inf")
        for plan in sorted((p for p in row if (p > depth) == is_tree), reverse=True):
            found[plan] = least = min(least, row[plan])
    if 0 in found:
        found[0] = min(found.values())
    return dict(sorted(found.items()))


def plausible_rows(rows: Rows, depth: int) -> Rows:
    """The same for all rows of one context: nor do fewer requests take longer."""
    found: Rows = {}
    more: Row = {}
    for n in sorted(rows, reverse=True):
        row = {plan: min(s, more.get(plan, s)) for plan, s in rows[n].items()}
        found[n] = plausible(row, depth)
        more = more | found[n]
    return dict(sorted(found.items()))


class StepTimes:
    """Seconds of a step for any number of requests and any mean context.

    Attention reads the whole context of a request, so the time of a step is linear in
    it, and grows faster the more tokens are verified.

    Args:
        measured: may be empty.
        depth: the longest chain.
    """

    def __init__(self, measured: Table, depth: int):
        self.depth = depth
        self.measured = {
            context: plausible_rows(rows, depth) for context, rows in measured.items()
        }
        self._shortest = min(measured, default=0)
        self._rows: dict[int, Row] = {}  # at the shortest context
        self._slopes: list[tuple[float, Row]] = []  # by log of the requests
        if len(measured) > 1:
            longest = max(measured)
            self._slopes = [
                (log(n), self._slope(longest, n)) for n in sorted(measured[longest])
            ]

    def __bool__(self) -> bool:
        return bool(self.measured)

    def seconds(self, num_reqs: int, context: float = 0.0) -> Row:
        """Seconds of a step by plan.

        Args:
            num_reqs: requests in the step.
            context: mean tokens of a request so far; 0: the shortest measured.
        """
        if num_reqs not in self._rows:
            self._rows[num_reqs] = self._at_shortest(num_reqs)
        row, more = self._rows[num_reqs], context - self._shortest
        if not self._slopes or more <= 0:
            return row
        tokens = num_reqs * more

        def slope(plan: float) -> float:
            points = [(at, by_plan[plan]) for at, by_plan in self._slopes]
            return on_line(points, log(num_reqs))

        return {plan: seconds + slope(plan) * tokens for plan, seconds in row.items()}

    def _at_shortest(self, n: int) -> Row:
        """Between numbers of requests on a line; beyond the last, on the last line."""
        rows = self.measured[self._shortest]
        if n in rows or len(rows) == 1:
            return rows.get(n) or next(iter(rows.values()))
        sizes = list(rows)
        after = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        low, high = sizes[after - 1 : after + 1]
        share = max(n - low, 0) / (high - low)
        return {
            plan: seconds + share * max(0.0, rows[high][plan] - seconds)
            for plan, seconds in rows[low].items()
        }

    def _slope(self, context: int, n: int) -> Row:
        """Seconds that a token of context adds to a step, by plan."""
        short, row = self._at_shortest(n), self.measured[context][n]
        tokens = n * (context - self._shortest)
        added = [(plan, max(0.0, row[plan] - short[plan]) / tokens) for plan in row]
        return {plan: on_line(added, plan) for plan in short}


def on_line(points: list[tuple[float, float]], x: float) -> float:
    """Linear interpolation at x; beyond an end, the value of that end."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0 or at == len(points):
        return points[min(at, len(points) - 1)][1]
    (x1, y1), (x2, y2) = points[at - 1 : at + 1]
    return y1 + (y2 - y1) * (x - x1) / (x2 - x1)


class _Size:
    """Served over measured times at one batch size, as logarithms: a level that all
    plans share, since other load comes and goes, and each plan's deviation from it."""

    def __init__(self) -> None:
        self.level = 0.0
        self.deviations: dict[int, float] = {}
        self.num_steps: Counter[int] = Counter()  # by plan

    def observe(self, plan: int, value: float) -> None:
        steps = self.num_steps[plan]
        self.num_steps[plan] += 1
        deviation = self.deviations.setdefault(plan, 0.0)
        surprise = value - self.level - deviation
        if len(self.deviations) == 1 and steps < LEAST_STEPS:  # of the very first plan
            self.level += surprise / (steps + 1)
            return
        surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.deviations[plan] += surprise / min(steps + 1, MOST_STEPS)
        # A plan that is new tells little of the level, an old one much.
        self.level += LEVEL_GAIN * steps / (steps + 1) * surprise

    def value(self, plan: int) -> float:
        """Of a plan; that of one without steps is the level."""
        return self.level + self.deviations.get(plan, 0.0) * (plan in self.seen())

    def seen(self) -> set[int]:
        """Plans with enough steps."""
        return {plan for plan, steps in self.num_steps.items() if steps >= LEAST_STEPS}


class ServedTimes:
    """Corrects step times by plan, separately for each batch size."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_reqs: int, plan: int, ratio: float) -> None:
        """Records a step of a plan: its seconds over those measured at start."""
        size = self._sizes.setdefault(size_of(num_reqs), _Size())
        size.observe(plan, log(ratio))

    def seen(self, num_reqs: int) -> set[int]:
        """Plans whose steps were timed."""
        size = self._sizes.get(size_of(num_reqs))
        return size.seen() if size else set()

    def correct(self, num_reqs: int, measured: Mapping[int, float]) -> Row:
        """Seconds of a step by plan, corrected once two plans can be compared."""
        if len(self.seen(num_reqs)) < 2:
            return dict(measured)
        value = self._sizes[size_of(num_reqs)].value
        return {plan: seconds * exp(value(plan)) for plan, seconds in measured.items()}


def size_of(num_reqs: int) -> int:
    """The batch size that `num_reqs` requests count as."""
    return round(SIZES_PER_DOUBLING * log2(num_reqs))


class Intervals:
    """Seconds between the outputs of two equal steps.

    Decode steps run back to back, with or without async scheduling, so this is the time
    of such a step, with all of the host's work.
    """

    def __init__(self) -> None:
        self._last: Hashable = None
        self._ended = 0.0

    def end(self, kind: Hashable, now: float) -> float | None:
        """To be called for each step's output, with the time in seconds.

        Args:
            kind: of the step; None: its time says nothing about others.

        Returns:
            Seconds; None if the step before was of another kind.
        """
        seconds, is_same = now - self._ended, kind is not None and kind == self._last
        self._ended, self._last = now, kind
        return seconds if is_same else None
