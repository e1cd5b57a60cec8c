# SPDX-License-Identifier: Apache-2.0
"""What was wanted of the benchmarks, what was reached, and what bounds the rest.

Every figure is computed from results files. A bound is what the same measurements say
could be reached at most, if the one thing that it names were perfect.
"""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.spec_decode import published
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import (
    BASE,
    Comparison,
    Row,
    busy_share,
    ratio,
    steady_ratio,
)
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL
from benchmarks.spec_decode.results import BASE_V1, OURS, PointKey
from benchmarks.spec_decode.shapes import MODES, PARALLEL

DRAFTING = [mode for mode in MODES if mode != "none"]
MANY = (8, 16, 32, 64)


class Point(NamedTuple):
    """One point of a figure.

    Attributes:
        where: mode, K and requests, as far as the figure does not say.
        bound: the most that could be reached; None where nothing is known.
    """

    where: str
    wanted: float
    reached: float
    bound: float | None = None

    @property
    def is_met(self) -> bool:
        """To the two digits that are shown."""
        return round(self.reached, 2) >= self.wanted


class Figure(NamedTuple):
    """One sentence of what was wanted.

    Attributes:
        unit: "×" or "%".
        bounded_by: what a point's bound supposes.
    """

    title: str
    unit: str
    points: list[Point]
    bounded_by: str = ""


def figures(results: files.Results, inputs: files.Results) -> Iterator[Figure]:
    """All of them; without points where nothing was measured.

    Args:
        results: of engine.json.
        inputs: of prepare_inputs.json.
    """
    compared = Comparison(results)
    yield from _equal_length(compared)
    yield from _auto(compared)
    yield _published(compared)
    yield _memory_floor(compared)
    yield _busy(compared)
    yield from _input_preparation(inputs)
    yield _prefill(compared)


def _equal_length(compared: Comparison) -> Iterator[Figure]:
    """Tokens per second over the base's, at equal K and acceptance length."""
    floor = "draft passes that only read their weights"
    draft = [*_ratios(compared, "draft", {1: 2.2, 32: 2.2})]
    yield Figure("Draft model over the base", "×", draft, floor)
    for mode, name in (("pard", "PARD"), ("peagle", "P-EAGLE")):
        points = [*_ratios(compared, mode, {1: 1.2} | dict.fromkeys(MANY, 1.15))]
        yield Figure(f"{name} over the base", "×", points, floor)
    wanted = dict.fromkeys(compared.values("eagle3", EQUAL)[1], 1.0)
    points = [*_ratios(compared, "eagle3", wanted, lengths=(3, 7))]
    yield Figure("EAGLE-3 not slower than the base", "×", points, floor)


def _ratios(
    compared: Comparison,
    mode: str,
    wanted: dict[int, float],
    lengths: tuple[int, ...] | None = None,
) -> Iterator[Point]:
    for k in lengths or compared.values(mode, EQUAL)[0]:
        for n, least in wanted.items():
            pair = [compared.at(name, mode, k, EQUAL, n) for name in (OURS, BASE)]
            if (found := ratio(*pair)) is not None:
                yield Point(_where(k, n), least, found, floor_ratio(*pair))


def at_draft_floor_s(row: Row) -> float | None:
    """A step in which the drafter only reads its weights."""
    if row.target_s is None or row.draft_floor_s is None:
        return None
    return row.target_s + row.draft_floor_s


def floor_ratio(ours: Row, base: Row) -> float | None:
    """The ratio of steps if our draft passes only read their weights."""
    step = at_draft_floor_s(ours)
    return base.step_s / step if step and base.step_s else None


def _where(k: int, n: int, mode: str | None = None) -> str:
    place = f"K={k}, {n} request{'s' * (n > 1)}"
    return place if mode is None else f"{mode}, {place}"


def _auto(compared: Comparison) -> Iterator[Figure]:
    """ "auto", in steady decode with acceptance by position."""
    to_base, to_none, to_best = [], [], []
    for mode in DRAFTING:
        for n in compared.values(mode, BY_POSITION)[1]:
            try:
                lengths = compared.by_draft_length(mode, n)
            except LookupError:
                continue
            where = f"{mode}, {n} request{'s' * (n > 1)}"
            chosen, best = lengths.auto.expected_tokens_per_s, lengths.best
            to_best.append(Point(where, 0.97, lengths.share))
            none = compared.at(OURS, "none", 0, EQUAL, n)
            if (found := steady_ratio(chosen, none)) is not None:
                to_none.append(Point(where, 1.0, found))
            base = compared.at(BASE, mode, 7, EQUAL, n)
            found, bound = (steady_ratio(speed, base) for speed in (chosen, best))
            if found is not None and n in (32, 64):
                to_base.append(Point(where, {32: 1.4, 64: 1.5}[n], found, bound))
    best_k = "the best K that was measured, known beforehand"
    yield Figure('"auto" over the base\'s K=7', "×", to_base, best_k)
    yield Figure('"auto" not below no speculation', "×", to_none)
    yield Figure('"auto" to the best fixed K', "×", to_best)


def _published(compared: Comparison) -> Figure:
    """P-EAGLE over EAGLE-3 of ours, each at its best K, beside the post's ratio."""
    points = []
    for label in published.RATIOS:
        for n in compared.values("peagle", label)[1]:
            pair = [
                compared.best_k(OURS, mode, label, n) for mode in ("peagle", "eagle3")
            ]
            wanted, found = published.ratio(label, n), ratio(*pair)
            if wanted is not None and found is not None:
                where = f"{label}, {n} request{'s' * (n > 1)}"
                points.append(Point(where, wanted, found, _floor_gain(*pair)))
    bound = "a P-EAGLE pass that only reads its weights"
    return Figure("P-EAGLE over EAGLE-3, as the post has it", "×", points, bound)


def _floor_gain(peagle: Row, eagle3: Row) -> float | None:
    """The ratio of steady speeds if P-EAGLE's pass only read its weights, same K."""
    step = at_draft_floor_s(peagle)
    if not step or not eagle3.step_s:
        return None
    tokens = peagle.acceptance_length / step
    return tokens * eagle3.step_s / eagle3.acceptance_length


def _memory_floor(compared: Comparison) -> Figure:
    """Share that reading all weights once per pass is of a step of one request."""
    alone = compared.at(OURS, "none", 0, EQUAL, 1)
    points = []
    for mode in MODES:
        for k in compared.values(mode, EQUAL)[0]:
            row = compared.at(OURS, mode, k, EQUAL, 1)
            if row and row.floor_share is not None:
                bound = floor_bound(compared, row, alone)
                points.append(Point(f"{mode}, K={k}", 0.8, row.floor_share, bound))
    bound = "a drafter at its floor beside the target alone as it runs"
    return Figure("Share of the memory floor at 1 request", "%", points, bound)


def floor_bound(compared: Comparison, row: Row, alone: Row | None) -> float | None:
    """The share of the floor, were all but the target's pass at its floor."""
    if not (alone and alone.step_s and row.step_s and alone.floor_share):
        return None
    floor = row.floor_share * row.step_s
    target_floor = alone.floor_share * alone.step_s
    return floor / (floor - target_floor + alone.step_s)


def _busy(compared: Comparison) -> Figure:
    """Time in which a kernel runs, of a step without a profiler."""
    points = []
    for text, profile in sorted(compared.results.get("profiles", {}).items()):
        key = PointKey.parse(text)
        if key.engine.implementation != OURS or key.engine.shapes != compared.shapes:
            continue
        row = compared.row(key)
        if row is None or row.run != profile.get("run"):
            continue  # of another run, perhaps of another state of the code
        if (share := busy_share(profile, row)) is not None:
            mode = key.engine.mode
            where = _where(key.engine.num_tokens, key.concurrency, mode)
            points.append(Point(where, 0.97, share))
    return Figure("GPU busy", "%", points)


def _input_preparation(inputs: files.Results) -> Iterator[Figure]:
    found = inputs.get("measurements", {})
    launches, times = [], []
    for key, ours in found.items():
        implementation, mode, which, k, n = key.split("/")
        if (implementation, which, n) != (OURS, "first", "n32") or mode not in PARALLEL:
            continue
        base = found.get(key.replace(OURS, BASE_V1, 1))
        if base and base.get("device_s"):
            where = f"{mode}, K={k[1:]}"
            launches.append(Point(where, 1.0, 1 / ours["launches"]))
            times.append(Point(where, 5.0, base["device_s"] / ours["device_s"]))
    yield Figure("Input preparation in one launch", "×", launches)
    yield Figure("Input preparation over the base's chain, 32 requests", "×", times)


def _prefill(compared: Comparison) -> Figure:
    points = []
    for ours, base in compared.prefills():
        engine = ours.key.engine
        if engine.mode == "none":
            continue
        where = _where(engine.num_tokens, ours.key.concurrency, engine.mode)
        found = base.prefill_s.median / ours.prefill_s.median
        points.append(Point(where, 1.0, found))
    return Figure("Prefill not below the base's", "×", points)
