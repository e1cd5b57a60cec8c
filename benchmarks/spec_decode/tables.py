# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of engine results."""

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.spec_decode import published
from benchmarks.spec_decode.compare import (
    BASE,
    Comparison,
    Row,
    free_ratio,
    ratio,
    steady_ratio,
    step_ratio,
)
from benchmarks.spec_decode.plan import BY_POSITION, EQUAL, runs_mode
from benchmarks.spec_decode.results import (
    BASE_V1,
    BASE_V2,
    IMPLEMENTATIONS,
    OURS,
    Spread,
)
from benchmarks.spec_decode.shapes import MODES

NAMES = {
    "none": "No speculation",
    "draft": "Draft model",
    "pard": "PARD",
    "pard2": "PARD-2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
}
Cell = str | float | int | None


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A Markdown table; nothing at all without rows."""
    if not rows:
        return ""
    assert all(len(row) == len(head) for row in rows), "a row does not fit its head"
    lines = [head, ["---:"] * len(head), *([text(cell) for cell in r] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def speed(found: Spread | None) -> str | None:
    return None if found is None else varied(found, f"{found.median:.0f}")


def varied(found: Spread, median: str) -> str:
    """A median, with half its range where there are repeats: 412 ± 3 %."""
    return median if found.count == 1 else f"{median} ± {found.spread * 100:.0f} %"


def times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}×"


def percent(value: float | None) -> str | None:
    return None if value is None else f"{value * 100:.0f} %"


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


POINT_HEAD = (
    "K",
    "requests",
    "ours, tokens/s",
    "base's best",
    "ratio",
    "ratio of steps",
    "were drafts free",
    "TPOT, ms",
    "step, ms",
    "target, ms",
    "draft, ms",
    "of the floor",
    "base: step, ms",
    "base: draft, ms",
)


def runner_text(compared: Comparison, ours: Row | None, base: Row) -> str:
    """Which runner of the base it is, and how it came to be the best: "v1 alone, †"."""
    key = base.key
    others = [
        name
        for name in (BASE_V2, BASE_V1)
        if name != key.engine.implementation and runs_mode(name, key.engine.mode)
    ]
    rows = [
        compared.row(key._replace(engine=key.engine._replace(implementation=name)))
        for name in others
    ]
    alone = " alone" if None in rows else ""
    beside = "" if ours is None or ours.run == base.run else ", †"
    return f"{key.engine.implementation[-2:]}{alone}{beside}"


def point_cells(ours: Row | None, base: Row | None, runner: str | None) -> list[Cell]:
    own = [None] * 5
    if ours:
        step = (ours.tpot_s, ours.step_s, ours.target_s, ours.draft_s)
        own = [*map(ms, step), percent(ours.floor_share)]
    return [
        ours and speed(ours.tokens_per_s),
        base and f"{speed(base.tokens_per_s)} ({runner})",
        times(ratio(ours, base)),
        times(step_ratio(ours, base)),
        times(free_ratio(ours, base)),
        *own,
        base and ms(base.step_s),
        base and ms(base.draft_s),
    ]


def mode_table(compared: Comparison, mode: str) -> str:
    """Every K and concurrency of a mode at equal acceptance length."""
    drafts, concurrencies = compared.values(mode, EQUAL)
    rows = []
    for k in drafts:
        for concurrency in concurrencies:
            pair = [compared.at(n, mode, k, EQUAL, concurrency) for n in (OURS, BASE)]
            if any(pair):
                runner = pair[1] and runner_text(compared, *pair)
                rows.append([k, concurrency, *point_cells(*pair, runner)])
    return table(POINT_HEAD, rows)


def envelope_table(compared: Comparison) -> str:
    """Each mode at its best K."""
    rows = []
    for mode in MODES:
        for concurrency in compared.values(mode, EQUAL)[1]:
            best = [compared.best_k(n, mode, EQUAL, concurrency) for n in (OURS, BASE)]
            cells = [b and f"{b.tokens_per_s.median:.0f} (K={_k(b)})" for b in best]
            rows.append([NAMES[mode], concurrency, *cells, times(ratio(*best))])
    return table(("mode", "requests", "ours, tokens/s", "base's best", "ratio"), rows)


def _k(row: Row) -> int:
    return row.key.engine.num_tokens


def prefill_table(compared: Comparison) -> str:
    """Until all requests of a round have their first token, at K=7."""
    rows = []
    for ours, base in compared.prefills():
        pair = ours.prefill_s, base.prefill_s
        cells = [varied(one, f"{one.median * 1e3:.1f}") for one in pair]
        cells.append(times(base.prefill_s.median / ours.prefill_s.median))
        rows.append([NAMES[ours.key.engine.mode], ours.key.concurrency, *cells])
    return table(("mode", "requests", "ours, ms", "base's best, ms", "ratio"), rows)


def auto_table(compared: Comparison, mode: str) -> str:
    """A draft length that every step chooses, beside the fixed ones."""
    rows = []
    drafts: list[int] = []
    for concurrency in compared.values(mode, BY_POSITION)[1]:
        try:
            lengths = compared.by_draft_length(mode, concurrency)
        except LookupError:
            continue
        drafts = sorted({*drafts, *lengths.fixed})
        none = compared.at(OURS, "none", 0, EQUAL, concurrency)
        base = compared.at(BASE, mode, 7, EQUAL, concurrency)
        chosen = lengths.auto.expected_tokens_per_s
        cells = [
            f"{chosen:.0f} (mean K {lengths.auto.mean_k:.1f})",
            times(lengths.share),
            times(steady_ratio(chosen, base)),
            times(steady_ratio(chosen, none)),
        ]
        rows.append((concurrency, lengths.fixed, cells))
    head = (
        "requests",
        *(f"K={k}, tokens/s" for k in drafts),
        "auto, tokens/s",
        "auto to the best fixed K",
        "auto to the base's best at K=7",
        "auto to no speculation",
    )
    cells_of = (
        [c, *(s.get(k) and f"{s[k]:.0f}" for k in drafts), *cells]
        for c, s, cells in rows
    )
    return table(head, list(cells_of))


def published_table(compared: Comparison, data_set: str) -> str:
    """P-EAGLE over EAGLE-3, each at its best K, beside the post's ratio."""
    rows = []
    for concurrency in compared.values("peagle", data_set)[1]:
        cells: list[Cell] = [concurrency]
        for name in (OURS, BASE):
            best = [
                compared.best_k(name, mode, data_set, concurrency)
                for mode in ("peagle", "eagle3")
            ]
            cells += [b and f"{b.tokens_per_s.median:.0f} (K={_k(b)})" for b in best]
            cells.append(times(ratio(*best)))
        rows.append([*cells, times(published.ratio(data_set, concurrency))])
    head = ["requests"]
    for name in ("ours", "base"):
        head += [f"{name}: P-EAGLE", f"{name}: EAGLE-3", f"{name}: ratio"]
    return table([*head, "post's ratio"], rows)


def prepare_table(measurements: dict[str, dict[str, Any]]) -> str:
    """Input preparation, microseconds on the device and on the host."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for key, found in measurements.items():
        implementation, *point = key.split("/")
        rows.setdefault(tuple(point), {})[implementation] = found
    head = ["mode", "pass", "K", "requests"]
    for name in IMPLEMENTATIONS:
        head += [f"{name}: launches", "device, µs", "host, µs"]
    cells = [
        [*_labels(point), *_prepare_cells(rows[point])]
        for point in sorted(rows, key=_labels)
    ]
    return table([*head, "floor, µs"], cells)


def _labels(point: tuple[str, ...]) -> tuple[str, str, int, int]:
    mode, which, drafts, requests = point
    return NAMES[mode], which, int(drafts[1:]), int(requests[1:])


def _prepare_cells(found: dict[str, Any]) -> list[Cell]:
    cells: list[Cell] = []
    for name in IMPLEMENTATIONS:
        entry = found.get(name, {})
        cells.append(entry.get("launches"))
        cells += [us(entry.get("device_s")), us(entry.get("host_s"))]
    return [*cells, us(found.get(OURS, {}).get("floor_s"))]


SERVING_COLUMNS = (
    "num_prompts",
    "output_throughput",
    "request_throughput",
    *(
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "itl")
        for kind in ("median", "p99")
    ),
)


def serving_table(measurements: dict[str, dict[str, Any]]) -> str:
    """What `vllm bench serve` found, by mode and request rate."""

    def place(key: str) -> tuple[str, float, int, str]:
        name, mode, drafts, rate = key.split("/")
        order = IMPLEMENTATIONS.index(name)
        return mode, float(rate.removeprefix("rate")), order, drafts

    rows = [
        [
            NAMES[key.split("/")[1]],
            key.split("/")[2][1:].replace("auto", ", auto"),
            f"{place(key)[1]:g}",
            key.split("/")[0],
            *(measurements[key].get(column) for column in SERVING_COLUMNS),
        ]
        for key in sorted(measurements, key=place)
    ]
    columns = [name.replace("_", " ") for name in SERVING_COLUMNS]
    return table(["mode", "K", "requests/s", "", *columns], rows)


def us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:.1f}"


def products_table(measurements: dict[str, dict[str, Any]]) -> str:
    """Microseconds of a matrix product, by rows of the batch."""
    rows = sorted({int(n) for found in measurements.values() for n in found["seconds"]})
    cells = [
        [n, *(us(found["seconds"].get(str(n))) for found in measurements.values())]
        for n in rows
    ]
    return table(["rows", *(f"{name}, µs" for name in measurements)], cells)


def engine_sections(compared: Comparison) -> Iterator[tuple[str, str]]:
    """Title and table of all that a results file has."""
    yield "Each mode at its best K", envelope_table(compared)
    for mode in MODES:
        yield f"{NAMES[mode]}, equal acceptance length", mode_table(compared, mode)
    yield "Prefill of 128 tokens a request", prefill_table(compared)
    for mode in MODES:
        yield f"{NAMES[mode]}, draft length", auto_table(compared, mode)
    for data_set in published.RATIOS:
        title = f"P-EAGLE against EAGLE-3 at the acceptance lengths of {data_set}"
        yield title, published_table(compared, data_set)
