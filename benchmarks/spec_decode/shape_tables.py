# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the shapes beside the main ones, where only ours is measured."""

from collections.abc import Iterator

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import Comparison, Row, ratio
from benchmarks.spec_decode.plan import EQUAL
from benchmarks.spec_decode.results import MAIN_SHAPES, OURS, EngineKey
from benchmarks.spec_decode.shapes import CONFIGS, modes_of
from benchmarks.spec_decode.tables import (
    NAMES,
    Cell,
    ms,
    percent,
    speed,
    table,
    times,
)

TITLES = {
    "qwen3-8b": "Qwen3-8B with a PARD-2 drafter of Qwen3-0.6B's shape",
    "gpt-oss-20b": "gpt-oss-20b, MXFP4, with a P-EAGLE head of four layers",
}
ENGINE_HEAD = (
    "engine",
    "drafter",
    "start, s",
    "graphs",
    "target's FULL graphs",
    "drafter's FULL graphs",
)
POINT_HEAD = (
    "mode",
    "K",
    "requests",
    "tokens/s",
    "to no speculation",
    "TPOT, ms",
    "step, ms",
    "target, ms",
    "draft, ms",
    "of the floor",
)


def shape_sections(results: files.Results) -> Iterator[tuple[str, str]]:
    """Title and tables of every set of shapes but the main one."""
    for shapes in CONFIGS:
        if shapes != MAIN_SHAPES:
            found = engine_table(results, shapes), point_table(results, shapes)
            yield TITLES[shapes], "\n".join(filter(None, found))


def engine_table(results: files.Results, shapes: str) -> str:
    """That they start, and what graphs they record."""
    rows = []
    for text, engine in sorted(results.get("engines", {}).items()):
        key = EngineKey.parse(text)
        if key.shapes == shapes:
            graphs = engine["target_full_graphs"], engine["draft_full_graphs"]
            how = engine["drafter"], f"{engine['start_s']:.0f}"
            rows.append([text, *how, engine["cudagraph_mode"], *graphs])
    return table(ENGINE_HEAD, rows)


def point_table(results: files.Results, shapes: str) -> str:
    """Every mode, K and concurrency of ours, at equal acceptance length."""
    compared, rows = Comparison(results, shapes), []
    for mode in modes_of(shapes):
        drafts, concurrencies = compared.values(mode, EQUAL)
        for k in drafts:
            for n in concurrencies:
                plain = compared.at(OURS, "none", 0, EQUAL, n)
                if row := compared.at(OURS, mode, k, EQUAL, n):
                    rows.append([NAMES[mode], k, n, *_cells(row, plain)])
    return table(POINT_HEAD, rows)


def _cells(row: Row, plain: Row | None) -> list[Cell]:
    gain = ratio(row, plain) if row.key.engine.mode != "none" else None
    step = (row.tpot_s, row.step_s, row.target_s, row.draft_s)
    return [
        speed(row.tokens_per_s),
        times(gain),
        *map(ms, step),
        percent(row.floor_share),
    ]
