# SPDX-License-Identifier: Apache-2.0
"""The table of families in the docs: `python -m tests.checkpoints.table` writes it."""

from pathlib import Path

from vllm.config.draft_families import FAMILIES, DraftFamily

from .families import PUBLISHED

DOC = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEAD = ("family", "told by", "method", "tokens a pass", "K if unsaid", "tested as")


def row(family: DraftFamily) -> tuple[str, ...]:
    tested = [name for name, made in PUBLISHED.items() if made.family == family.name]
    return (
        family.name,
        family.told_by,
        f"`{family.method}`",
        "K" if family.is_parallel else "1",
        str(family.num_drafts),
        ", ".join(tested),
    )


def table() -> str:
    rows = [HEAD, ("---",) * len(HEAD), *map(row, FAMILIES)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def filled_in(text: str) -> str:
    """The document with the table between its marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    DOC.write_text(filled_in(DOC.read_text()))
