# SPDX-License-Identifier: Apache-2.0
"""What the speculative decoding example reports: rows, table, exit status."""

from typing import Any

from spec_decode_flags import Drafting


def first_difference(first: list[int], second: list[int]) -> int | None:
    """Index of the first token at which two outputs differ; None if they do not."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return None if len(first) == len(second) else min(len(first), len(second))


def make_row(
    drafting: Drafting,
    result: dict[str, Any],
    baseline: dict[str, Any] | None,
    greedy: bool,
) -> dict[str, Any]:
    """One row of the table. Without a baseline some cells are None."""
    tokens = sum(map(len, result["token_ids"]))
    row = {
        "name": drafting.name,
        "method": drafting.method,
        "model": drafting.drafter,
        "parallel_drafting": drafting.parallel,
        **{key: result[key] for key in ("runner", "kernels", "speculator", "device")},
        "num_spec_tokens": drafting.num_tokens,
        **acceptance(result["counters"]),
        "output_tokens": tokens,
        "seconds": result["seconds"],
        "tokens_per_second": tokens / result["seconds"],
    }
    return row | compare(row, result, baseline, greedy)


def acceptance(counters: dict[str, list[int]]) -> dict[str, Any]:
    """Mean tokens a step yields, and the share of drafts accepted up to each one."""
    drafts = counters.get("num_drafts", [0])[0]
    if not drafts:
        return {"acceptance_length": None, "acceptance_by_position": []}
    by_position = counters["num_accepted_tokens_per_pos"]
    return {
        "acceptance_length": 1 + counters["num_accepted_tokens"][0] / drafts,
        "acceptance_by_position": [count / drafts for count in by_position],
    }


def compare(
    row: dict[str, Any],
    result: dict[str, Any],
    baseline: dict[str, Any] | None,
    greedy: bool,
) -> dict[str, Any]:
    if baseline is None:
        return {"ratio": None, "identical": None, "differences": []}
    pairs = zip(baseline["token_ids"], result["token_ids"], strict=True)
    found = [first_difference(*pair) for pair in pairs]
    differences = [
        {"prompt": i, "token": at} for i, at in enumerate(found) if at is not None
    ]
    speed = sum(map(len, baseline["token_ids"])) / baseline["seconds"]
    return {
        "ratio": row["tokens_per_second"] / speed,
        "identical": not differences if greedy else None,
        "differences": differences if greedy else [],
    }


HEADER = (
    *("method", "runner", "kernels", "K", "acceptance length"),
    *("acceptance by position", "tokens/s", "ratio", "identical to no speculation"),
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    by_position = row["acceptance_by_position"]
    unknown = "-" if row["method"] == "none" else "n/a"
    return (
        row["name"],
        row["runner"],
        row["kernels"],
        str(row["num_spec_tokens"] or "-"),
        shown(row["acceptance_length"], 2),
        " ".join(f"{share:.2f}".removeprefix("0") for share in by_position) or "-",
        shown(row["tokens_per_second"], 1),
        shown(row["ratio"], 2),
        {True: "yes", False: "NO", None: unknown}[row["identical"]],
    )


def format_table(rows: list[dict[str, Any]]) -> str:
    lines = [HEADER, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in [lines[0], tuple("-" * width for width in widths), *lines[1:]]
    ]
    return "\n".join(line.rstrip() for line in padded)


def remarks(report: dict[str, Any]) -> list[str]:
    """What a reader of the table must know to read it right."""
    rows, settings = report["rows"], report["settings"]
    lines = [
        f"{rows[0]['device']}, {settings['dtype']}, {settings['num_prompts']} prompts, "
        f"at most {settings['output_len']} tokens each, "
        f"temperature {settings['temp']:g}; {report['seconds']:.0f} s in all."
    ]
    if any(row["kernels"] == "interpreted" for row in rows):
        lines.append(
            "Triton's interpreter ran the kernels: tokens/s and ratio say nothing "
            "about speed on a GPU."
        )
    for row in rows:
        lines += [
            f"{row['name']}: prompt {found['prompt']} differs from token "
            f"{found['token']} on."
            for found in row["differences"]
        ]
    on_cpu = rows[0]["device"] == "CPU"
    if exit_status(rows) and on_cpu and settings["dtype"] != "float32":
        lines.append("Equal logits can do that in a short dtype: try --dtype float32.")
    return lines


def exit_status(rows: list[dict[str, Any]]) -> int:
    return int(any(row["identical"] is False for row in rows))
