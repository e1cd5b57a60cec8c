# SPDX-License-Identifier: Apache-2.0
"""Pictures of slots, as SVG. Each brings its own ground, so that it is readable on a
light and on a dark page, whichever the page's switch says."""

from collections.abc import Iterator

from . import slots
from .slots import Mode, Slot

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP = 60, 40, 96, 16
PASS_HEIGHT = CELL_HEIGHT + 56
# What a slot's kind is called in the legend.
KINDS = {
    slots.TARGET: "target token",
    slots.NEXT: "next token",
    slots.DRAFT: "draft of the pass before",
    slots.MASK: "mask",
    slots.REJECTED: "rejected",
    slots.PADDING: "padding",
}
# Colours of the ground, of text, of text beside the slots, and of slots by their kind.
LIGHT = {
    "ground": "#ffffff",
    "text": "#1f2328",
    "beside": "#57606a",
    slots.TARGET: "#cfe2ff",
    slots.NEXT: "#b7efcb",
    slots.DRAFT: "#ffe1b3",
    slots.MASK: "#e5d6ff",
    slots.REJECTED: "#ffd3cf",
    slots.PADDING: "#eaeef2",
}
DARK = {
    "ground": "#1b1e26",
    "text": "#f0f3f6",
    "beside": "#aeb6c0",
    slots.TARGET: "#1f4478",
    slots.NEXT: "#1d5c3c",
    slots.DRAFT: "#6a450f",
    slots.MASK: "#523a85",
    slots.REJECTED: "#7a2e2a",
    slots.PADDING: "#343a43",
}


def picture(mode: Mode) -> str:
    """The whole SVG document of a mode."""
    rows = [slots.verified(), *slots.passes(mode)]
    names = ["verified", *(f"pass {number}" for number in range(1, len(rows)))]
    kinds = [kind for kind in KINDS if any(s.kind == kind for row in rows for s in row)]
    width = LEFT + max(len(row) for row in rows) * CELL_WIDTH + 16
    width = max(width, 32 + sum(map(_legend_width, kinds)))
    height = TOP + CELL_HEIGHT + 40 + (len(rows) - 1) * PASS_HEIGHT + 32
    body, y = [], TOP
    for name, row in zip(names, rows, strict=True):
        body += _row(mode, name, row, y)
        y += PASS_HEIGHT if name != "verified" else CELL_HEIGHT + 40
    body += _legend(kinds, height - 20)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">\n'
        f"<title>{mode.title}: the slots of a request in a step</title>\n"
        f"<style>\n{_style()}</style>\n"
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _style() -> str:
    return (
        "text { font: 13px system-ui, sans-serif; text-anchor: middle }\n"
        ".left { text-anchor: start }\n"
        f"{_colours(LIGHT)}"
        "@media (prefers-color-scheme: dark) {\n"
        f"{_colours(DARK)}"
        "}\n"
    )


def _colours(palette: dict[str, str]) -> str:
    rules = {"text": palette["text"], ".beside": palette["beside"]}
    rules |= {f".{name}": palette[name] for name in ("ground", *KINDS)}
    return "".join(f"{rule} {{ fill: {fill} }}\n" for rule, fill in rules.items())


def _row(mode: Mode, name: str, row: list[Slot], y: int) -> Iterator[str]:
    middle = y + CELL_HEIGHT // 2 + 4
    yield f'<text class="left" x="16" y="{middle}">{name}</text>'
    yield f'<text class="left beside" x="16" y="{y + CELL_HEIGHT + 17}">position</text>'
    is_fed = mode.takes_hidden and name != "verified"
    for column, slot in enumerate(row):
        hidden = hidden_text(mode, slot, column) if is_fed else ""
        yield from _cell(slot, hidden, LEFT + column * CELL_WIDTH, y)


def _cell(slot: Slot, hidden: str, x: int, y: int) -> Iterator[str]:
    middle, below = x + CELL_WIDTH // 2, y + CELL_HEIGHT
    yield (
        f'<rect class="{slot.kind}" x="{x + 2}" y="{y}" width="{CELL_WIDTH - 4}" '
        f'height="{CELL_HEIGHT}" rx="4"/>'
    )
    token = token_text(slot)
    if token:
        yield f'<text x="{middle}" y="{y + (17 if hidden else 25)}">{token}</text>'
        yield f'<text class="beside" x="{middle}" y="{below + 17}">{_p(slot)}</text>'
    if hidden:
        yield f'<text x="{middle}" y="{y + 33}">{hidden}</text>'
    if slot.draft is not None:
        yield f'<text x="{middle}" y="{below + 36}">→ d{slot.draft}</text>'


def token_text(slot: Slot) -> str:
    """What stands in a slot: t2, next, d1, mask, or nothing."""
    letters = {slots.TARGET: "t", slots.REJECTED: "t", slots.DRAFT: "d"}
    if slot.kind in letters:
        return f"{letters[slot.kind]}{slot.token}"
    return "" if slot.kind == slots.PADDING else slot.kind


def hidden_text(mode: Mode, slot: Slot, column: int) -> str:
    """The hidden state that a slot is fed: the target's, a learned one, or its own."""
    if slot.kind in (slots.PADDING, slots.DRAFT):
        return "own" if slot.kind == slots.DRAFT else ""
    row = slots.hidden_row(mode, column)
    return "learned" if row is None else f"h{row}"


def _p(slot: Slot) -> str:
    return f"p+{slot.position}" if slot.position else "p"


def _legend_width(kind: str) -> int:
    return 46 + 7 * len(KINDS[kind])


def _legend(kinds: list[str], y: int) -> Iterator[str]:
    x = 16
    for kind in kinds:
        square = f'x="{x}" y="{y - 11}" width="14" height="14" rx="3"'
        yield f'<rect class="{kind}" {square}/>'
        yield f'<text class="left beside" x="{x + 20}" y="{y}">{KINDS[kind]}</text>'
        x += _legend_width(kind)
