# SPDX-License-Identifier: Apache-2.0
"""What pages and pictures take from code and results; never typed.

A page holds it between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

import re
from collections.abc import Callable
from pathlib import Path

from tools.package import record
from tools.upstream import results

from . import DOCS, checkpoints, drafters, gpu_tests, log_lines, seams, slots, svg

Text = Callable[[], str]


def layout_table() -> str:
    """The layout's numbers, mode by mode, for the drafts of the pictures."""
    head = ("mode", "token shift", "width", "extra slots", "passes", "sampled a pass")
    head += ("slots of a later pass", "positions ahead")
    lines = [head, ("---",) + ("---:",) * (len(head) - 1)]
    for mode in slots.MODES:
        layout = mode.layout
        samples = layout.samples_per_pass(layout.num_speculative_tokens)
        cells = (
            layout.token_shift,
            layout.parallel_width,
            layout.num_extra_slots,
            layout.num_passes,
            ", ".join(map(str, samples)),
            layout.num_follow_slots if layout.num_passes > 1 else "–",
            layout.num_lookahead_tokens,
        )
        lines.append((mode.title, *map(str, cells)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


TEXTS: dict[str, Text] = {
    "families": checkpoints.family_table,
    "checkpoints": checkpoints.checkpoint_table,
    "checkpoints from": checkpoints.provenance,
    "layout": layout_table,
    "cost of a step": drafters.cost_tables,
    "gpu tests": gpu_tests.gpu_test_table,
    "seams": seams.seam_table,
    "upstream results": results.result_table,
    "wheels": record.wheel_table,
    "warnings": log_lines.warning_table,
    "published acceptance": drafters.published_table,
    "bundled acceptance": drafters.bundled_table,
    "fed gain": drafters.fed_gain_table,
}


def with_generated(page: str, texts: dict[str, Text]) -> str:
    """The page with what stands between its markers replaced.

    Raises:
        KeyError: a marker names what nothing makes.
    """

    def replaced(found: re.Match) -> str:
        name = found["name"]
        return f"<!-- generated: {name} -->\n\n{texts[name]()}\n\n<!-- end: {name} -->"

    block = r"<!-- generated: (?P<name>[^>]+) -->.*?<!-- end: (?P=name) -->"
    return re.sub(block, replaced, page, flags=re.DOTALL)


def outdated(docs: Path = DOCS, write: bool = False) -> list[Path]:
    """Files that are not what code and results make of them; `write` renews them."""
    wanted = {
        docs / "images" / "slots" / f"{mode.name}.svg": svg.picture(mode)
        for mode in slots.MODES
    }
    for page in docs.glob("**/*.md"):
        wanted[page] = with_generated(page.read_text(), TEXTS)
    old = [p for p, text in wanted.items() if not p.is_file() or p.read_text() != text]
    for path in old if write else []:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    return old
