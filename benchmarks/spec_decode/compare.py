# SPDX-License-Identifier: Apache-2.0
"""Points of an engine results file set beside each other."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL
from benchmarks.spec_decode.results import (
    BASE_V1,
    BASE_V2,
    MAIN_SHAPES,
    OURS,
    EngineKey,
    PointKey,
    Spread,
)
from benchmarks.spec_decode.shapes import MODES, PARALLEL

BASE = "base"  # whichever of its runners is the faster at a point


@dataclass(frozen=True)
class Row:
    """One point's numbers, medians over repeats; None where there is none."""

    key: PointKey
    tokens_per_s: Spread
    acceptance_length: float
    tpot_s: float | None
    prefill_s: Spread | None
    step_s: float | None
    draft_s: float | None
    tokens_per_step: float | None
    expected_tokens_per_s: float | None
    mean_k: float
    floor_share: float | None
    draft_floor_s: float | None  # reading the drafter's weights once per pass
    run: str  # the benchmark run that measured it

    @property
    def target_s(self) -> float | None:
        """The rest of a step: the target's pass, sampling and the host."""
        if self.step_s is None:
            return None
        return self.step_s - (self.draft_s or 0.0)


class DraftLengths(NamedTuple):
    """A mode in steady decode: tokens per second at each fixed K, and "auto"."""

    fixed: dict[int, float]
    auto: Row

    @property
    def best(self) -> float:
        """Tokens per second of the best fixed K."""
        return max(self.fixed.values())

    @property
    def share(self) -> float:
        """Of the best fixed K's speed that "auto" reaches."""
        return self.auto.expected_tokens_per_s / self.best


class Comparison:
    """The measurements that one results file has of a set of shapes."""

    def __init__(self, results: files.Results, shapes: str = MAIN_SHAPES):
        self.results, self.shapes = results, shapes
        self.measurements = results.get("measurements", {})
        keys = map(PointKey.parse, self.measurements)
        self.keys = [key for key in keys if key.engine.shapes == shapes]

    def row(self, key: PointKey) -> Row | None:
        point = self.measurements.get(str(key))
        if not point or not (speed := files.column(point, "tokens_per_s")):
            return None

        def value(name: str) -> float | None:
            found = files.column(point, name)
            return found and found.median

        return Row(
            key=key,
            tokens_per_s=speed,
            acceptance_length=point["acceptance_length"],
            tpot_s=value("tpot_s"),
            prefill_s=files.column(point, "prefill_s"),
            step_s=value("step_s"),
            draft_s=value("draft_s"),
            tokens_per_step=value("tokens_per_step"),
            expected_tokens_per_s=value("expected_tokens_per_s"),
            mean_k=mean_k(key.engine.num_tokens, point["repeats"]),
            floor_share=files.floor_share(self.results, key, PARALLEL),
            draft_floor_s=files.draft_floor_s(self.results, key, PARALLEL),
            run=point.get("run", ""),
        )

    def at(
        self, name: str, mode: str, k: int, acceptance: str, concurrency: int
    ) -> Row | None:
        """The row of an implementation, or of the base's faster runner."""
        names = (BASE_V2, BASE_V1) if name == BASE else (name,)
        keys = [
            PointKey(
                EngineKey(one, mode, k, shapes=self.shapes), acceptance, concurrency
            )
            for one in names
        ]
        return fastest(self.row(key) for key in keys)

    def by_draft_length(self, mode: str, concurrency: int) -> DraftLengths:
        """Ours by draft length, acceptance by position.

        Raises:
            LookupError: one of the two was not measured.
        """
        keys = [
            key
            for key in sorted(self.keys)
            if key.engine.mode == mode
            and (key.acceptance, key.concurrency) == (BY_POSITION, concurrency)
        ]
        rows = [self.row(key) for key in keys]
        known = [row for row in rows if row and row.expected_tokens_per_s]
        fixed = {
            row.key.engine.num_tokens: row.expected_tokens_per_s
            for row in known
            if not row.key.engine.is_auto
        }
        chosen = [row for row in known if row.key.engine.is_auto]
        if not fixed or not chosen:
            raise LookupError(f"{mode} at {concurrency}: no {BY_POSITION} points")
        return DraftLengths(fixed, chosen[-1])

    def best_k(
        self, name: str, mode: str, acceptance: str, concurrency: int
    ) -> Row | None:
        """The row of the K that is the fastest."""
        drafts = {key.engine.num_tokens for key in self.keys}
        return fastest(
            self.at(name, mode, k, acceptance, concurrency) for k in sorted(drafts)
        )

    def prefills(self) -> Iterator[tuple[Row, Row]]:
        """Ours and the base's best, K = 7 or no drafts, where both were measured."""
        for mode in MODES:
            k = 7 if mode != "none" else 0
            for concurrency in self.values(mode, EQUAL)[1]:
                ours = self.at(OURS, mode, k, EQUAL, concurrency)
                base = self.at(BASE, mode, k, EQUAL, concurrency)
                if ours and base and ours.prefill_s and base.prefill_s:
                    yield ours, base

    def values(self, mode: str, acceptance: str) -> tuple[list[int], list[int]]:
        """The K and the concurrencies measured for a mode."""
        keys = [
            key
            for key in self.keys
            if key.engine.mode == mode and key.acceptance == acceptance
        ]
        return (
            sorted({key.engine.num_tokens for key in keys}),
            sorted({key.concurrency for key in keys}),
        )


def mean_k(longest: int, repeats: list[dict[str, Any]]) -> float:
    """Mean tokens drafted per request and step."""
    counts: Counter[int] = Counter()
    for repeat in repeats:
        for length, steps in repeat.get("drafted", {}).items():
            counts[int(length)] += steps
    if not counts:
        return float(longest)
    return sum(k * n for k, n in counts.items()) / counts.total()


def fastest(rows: Iterable[Row | None]) -> Row | None:
    known = [row for row in rows if row is not None]
    return max(known, key=lambda row: row.tokens_per_s.median) if known else None


def ratio(ours: Row | None, base: Row | None) -> float | None:
    if ours is None or base is None:
        return None
    return ours.tokens_per_s.median / base.tokens_per_s.median


def step_ratio(ours: Row | None, base: Row | None) -> float | None:
    """How much shorter a steady step is: free of prefill, tail and chance."""
    if ours is None or base is None or not ours.step_s or not base.step_s:
        return None
    return base.step_s / ours.step_s


def free_ratio(ours: Row | None, base: Row | None) -> float | None:
    """The ratio of steps if drafting took no time; no drafter exceeds it."""
    if not (ours and base and ours.target_s and base.step_s):
        return None
    return base.step_s / ours.target_s


def steady_ratio(tokens_per_s: float, other: Row | None) -> float | None:
    """To what another does in steady decode, acceptance being just its mean."""
    if other is None or not other.step_s:
        return None
    steady = other.key.concurrency * other.acceptance_length / other.step_s
    return tokens_per_s / steady


def busy_share(profile: dict[str, Any], row: Row | None) -> float | None:
    """Of a step as it runs without a profiler."""
    if row is None or not row.step_s or profile["busy_share"] is None:
        return None
    return profile["busy_share"] * profile["step_s"] / row.step_s
