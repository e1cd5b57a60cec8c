# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step by plan: measured at start, corrected by steps that are served."""

from bisect import bisect_left
from collections import Counter
from math import exp, log, log2

import numpy as np

from .acceptance import HALF_LIFE

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
LEVEL_GAIN = 0.25  # how far the level of all plans follows a step
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
        self._slopes: dict[int, Row] = {}
        if len(measured) > 1:
            longest = max(measured)
            rows = self.measured[longest]
            self._slopes = {n: self._slope(n, longest, row) for n, row in rows.items()}

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
        at, sizes = log(num_reqs), [*map(log, self._slopes)]

        def slope(plan: float) -> float:
            slopes = [by_plan[plan] for by_plan in self._slopes.values()]
            return float(np.interp(at, sizes, slopes))

        tokens = num_reqs * more
        return {plan: seconds + slope(plan) * tokens for plan, seconds in row.items()}

    def _at_shortest(self, n: int) -> Row:
        """Between numbers of requests on a line; beyond the last, on the last line."""
        rows = self.measured.get(self._shortest, {})
        if n in rows or len(rows) < 2:
            return rows.get(n) or next(iter(rows.values()), {})
        sizes = list(rows)
        after = min(max(bisect_left(sizes, n), 1), len(sizes) - 1)
        low, high = sizes[after - 1 : after + 1]
        share = max(n - low, 0) / (high - low)
        return {
            plan: seconds + share * max(0.0, rows[high][plan] - seconds)
            for plan, seconds in rows[low].items()
        }

    def _slope(self, n: int, context: int, row: Row) -> Row:
        """Seconds that a token of context adds to a step, by plan; `row` has some."""
        short, tokens = self._at_shortest(n), n * (context - self._shortest)
        added = [max(0.0, row[plan] - short[plan]) / tokens for plan in row]
        return {plan: float(np.interp(plan, [*row], added)) for plan in short}


class ServedTimes:
    """Corrects step times of one batch size by plan.

    Keeps served over measured times as logarithms: a level that all plans share, since
    other load comes and goes, and each plan's deviation from it.
    """

    def __init__(self) -> None:
        self.level = 0.0
        self.deviations: dict[int, float] = {}
        self.num_steps: Counter[int] = Counter()  # by plan

    def observe(self, plan: int, ratio: float) -> None:
        """Records a step of a plan: its seconds over those measured at start."""
        steps = self.num_steps[plan]
        self.num_steps[plan] += 1
        deviation = self.deviations.setdefault(plan, 0.0)
        surprise = log(ratio) - self.level - deviation
        if len(self.deviations) == 1 and steps < LEAST_STEPS:  # of the very first plan
            self.level += surprise / (steps + 1)
            return
        surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        self.deviations[plan] += surprise / min(steps + 1, HALF_LIFE)
        # A plan that is new tells little of the level, an old one much.
        self.level += LEVEL_GAIN * steps / (steps + 1) * surprise

    def seen(self) -> set[int]:
        """Plans whose steps were timed, often enough."""
        return {plan for plan, steps in self.num_steps.items() if steps >= LEAST_STEPS}

    def correct(self, measured: Row) -> Row:
        """Seconds of a step by plan, corrected once two plans can be compared; those
        of a plan without steps by the level."""
        if len(seen := self.seen()) < 2:
            return measured
        found = {plan: s * exp(self.level) for plan, s in measured.items()}
        return found | {
            plan: found[plan] * exp(self.deviations[plan]) for plan in seen & {*found}
        }


def size_of(num_reqs: int) -> int:
    """The batch size that `num_reqs` requests count as, of those that are told apart:
    two for each doubling."""
    return round(2 * log2(num_reqs))
