# SPDX-License-Identifier: Apache-2.0
"""What a step with drafts costs and what it gains, by recorded results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import published
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.compare import Comparison
from benchmarks.spec_decode.draft_probabilities.mean import gain_error
from benchmarks.spec_decode.plan import EQUAL
from benchmarks.spec_decode.results import OURS
from benchmarks.spec_decode.shapes import BUNDLED, MODES
from benchmarks.spec_decode.tables import NAMES

CONCURRENCY = (1, 8, 32, 64)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cost_tables(folder: Path = files.RESULTS) -> str:
    """Steps with drafts over plain steps, by device, mode, K and requests."""
    found = (_cost_of(path) for path in sorted(folder.glob("*/engine.json")))
    return "\n\n".join(filter(None, found))


def _cost_of(path: Path) -> str:
    results = files.load(path)
    compared = Comparison(results)
    rows = list(_cost_rows(compared))
    if not rows:
        return ""
    run = results["runs"][max(results["runs"])]
    head = ["drafter", "K", *(f"{n} request{'s' * (n > 1)}" for n in CONCURRENCY)]
    return f"{run['device']['name']}:\n\n{_table(head, rows)}"


def _cost_rows(compared: Comparison) -> Iterator[list[str]]:
    plain = {n: compared.at(OURS, "none", 0, EQUAL, n) for n in CONCURRENCY}
    for mode in MODES:
        for k in filter(None, compared.values(mode, EQUAL)[0]):
            cells = []
            for n, without in plain.items():
                drafted = compared.at(OURS, mode, k, EQUAL, n)
                known = without and drafted and without.step_s and drafted.step_s
                cells.append(f"{drafted.step_s / without.step_s:.2f}" if known else "–")
            if set(cells) != {"–"}:
                yield [NAMES[mode], str(k), *cells]


def published_table() -> str:
    """Acceptance lengths that the P-EAGLE post reports."""
    rows = [
        [f"{NAMES[mode]}, K={k}", *(f"{by_mode[mode][k]:.2f}" for by_mode in sets)]
        for sets in [list(published.ACCEPTANCE.values())]
        for mode in ("peagle", "eagle3")
        for k in sets[0][mode]
    ]
    return _table(["drafter", *published.ACCEPTANCE], rows)


def bundled_table(folder: Path = BUNDLED) -> str:
    """Acceptance of the bundled drafters, as measured with vLLM."""
    measured = json.loads((folder / "measurements.json").read_text())
    count = measured["num_speculative_tokens"]
    head = ["drafter", "tokens a step", *(f"draft {n + 1}" for n in range(count))]
    rows = [
        [
            NAMES[mode],
            f"{measured[mode]['acceptance_length']:.2f}",
            *(f"{rate:.2f}" for rate in measured[mode]["acceptance_by_position"]),
        ]
        for mode in MODES
        if mode in measured
    ]
    return _table(head, rows)


def fed_gain_table(file: Path = files.RESULTS / "cpu" / "fed-gain.json") -> str:
    """PARD and PARD-2 on equal text, and what their errors leave of the difference."""
    points = files.load(file)["measurements"]
    names = {"pard": "PARD", "pard2-unfed": "PARD-2, fed zeros", "pard2": "PARD-2"}
    others = {"more than PARD": "pard", "more than fed zeros": "pard2-unfed"}
    rows = []
    for k in sorted({int(key.rpartition("/K")[2]) for key in points}):
        for at, (name, title) in enumerate(names.items()):
            point = points[f"{name}/K{k}"]
            length = f"{point['acceptance_length']:.3f} ± {point['standard_error']:.3f}"
            gains = [
                _gain(points[f"{other}/K{k}"], point) if place < at else "–"
                for place, other in enumerate(others.values())
            ]
            rows.append([title, str(k), str(point["requests"]), length, *gains])
    return _table(["drafter", "K", "prompts", "tokens a step", *others], rows)


def _gain(without: dict[str, Any], point: dict[str, Any]) -> str:
    gain = point["acceptance_length"] - without["acceptance_length"]
    error = gain_error(without["counts"], point["counts"])
    return f"{gain:+.3f} ± {error:.3f}"
