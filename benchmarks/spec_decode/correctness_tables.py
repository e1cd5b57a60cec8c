# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of what correctness.py found, on one device and on two."""

from collections.abc import Iterator
from math import sqrt
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.tables import Cell, table

HEAD = (
    "drafter and how",
    "outputs equal",
    "the rest are ties",
    "acceptance length",
    "by position",
    "steps",
    "graphs replayed",
    "steps that waited",
    "drafted",
)
FURTHEST = 3.0  # standard errors; of a hundred positions a third of one is beyond


def correctness_table(engines: dict[str, Any]) -> str:
    """Engine by engine; counts of steps where the engine ran in process."""
    return table(HEAD, [[name, *_cells(found)] for name, found in engines.items()])


def ranks_table(engines: dict[str, Any]) -> str:
    """Two data-parallel ranks, by drafter."""
    head = ("drafter", *HEAD[1:5], "batches of the idle rank")
    return table(
        head,
        [
            [name, *_cells(found)[:4], found["idle_batches"]]
            for name, found in engines.items()
        ],
    )


def _cells(found: dict[str, Any]) -> list[Cell]:
    return [
        f"{found['requests'] - len(found['differences'])} of {found['requests']}",
        "yes" if found["are_ties"] else "**no**",
        found["acceptance_length"],
        " ".join(f"{rate:.2f}" for rate in found["acceptance_by_position"]),
        _counts(found.get("steps")),
        _counts(found.get("graphs_replayed")),
        _counts(found.get("waiting_steps")),
        None if is_fixed(found) else _counts(found.get("drafted"), "K="),
    ]


def _counts(found: dict[str, int] | None, prefix: str = "") -> str | None:
    """{"7": 2} as "2 K=7"; None where nothing was counted."""
    if found is None:
        return None
    counts = (f"{n} {prefix}{what}" for what, n in sorted(found.items()) if n)
    return ", ".join(counts) or "none"


def waits_text(engines: dict[str, Any]) -> str:
    """Whether the host ever waited for the device in `propose`, and where."""
    known = {
        name: found
        for name, found in engines.items()
        if found.get("waiting_steps") is not None
    }
    if not known:
        return ""
    steps = sum(sum(found["steps"].values()) for found in known.values())
    waiting = sum(sum(found["waiting_steps"].values()) for found in known.values())
    places = sorted({place for f in known.values() for place in f["waited_at"]})
    where = f", at {', '.join(f'`{place}`' for place in places)}" if places else ""
    return (
        f'`propose` ran under `torch.cuda.set_sync_debug_mode("error")`: of {steps} '
        f"steps {waiting} made the host wait for the device{where}."
    )


def sanitizer_table(measurements: dict[str, Any]) -> str:
    """What compute-sanitizer's tools reported; of the control they must report."""
    rows: list[list[Cell]] = []
    for tool, found in sorted(measurements.items()):
        tests = found.get("tests_passed")
        passed = tests and f"{tests} of {tests + found['tests_failed']}"
        rows.append([tool, found["reports"], passed, found.get("examples")])
    return table(("tool", "reports", "tests passed", "batches a test"), rows)


def drift_table(here: files.Results, there: files.Results) -> str:
    """Acceptance by position of two devices, where their prompts were the same.

    The difference is in standard errors, as if drafts were independent of each other;
    on equal prompts both draft nearly the same, so it should be far below.
    """
    rows = [
        [
            name,
            _rates(one),
            _rates(other),
            " ".join(f"{error:+.1f}" for error in drift(one, other)),
            "yes" if is_noise(one, other) else "**no**",
        ]
        for name, one, other in pairs(here, there)
    ]
    head = ("engine", "GPU", "CPU", "difference, standard errors", "within noise")
    return table(head, rows)


def pairs(
    here: files.Results, there: files.Results
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Engines of a device, each beside the other device's of the same mode."""
    for name, one in here.get("engines", {}).items():
        if (other := _peer(name, one, here, there)) is not None:
            yield name, one, other


def is_noise(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return max(map(abs, drift(one, other))) <= FURTHEST


def _rates(found: dict[str, Any]) -> str:
    return " ".join(f"{rate:.3f}" for rate in found["acceptance_by_position"])


def _peer(
    name: str, one: dict[str, Any], here: files.Results, there: files.Results
) -> dict[str, Any] | None:
    """The other device's engine of the same mode that drafted on the same prompts."""
    if not is_fixed(one):
        return None
    prompts = _prompts(here, one)
    for found_name, other in there.get("engines", {}).items():
        is_same = found_name.split("-")[0] == name.split("-")[0] and is_fixed(other)
        if is_same and prompts and _prompts(there, other) == prompts:
            return other
    return None


def is_fixed(engine: dict[str, Any]) -> bool:
    """Whether all steps drafted alike: lengths that change are not another device's."""
    lengths = {int(k) for k in engine.get("drafted", {})}
    longest = len(engine["acceptance_by_position"])
    return bool(engine.get("drafts")) and lengths <= {longest}


def _prompts(results: files.Results, engine: dict[str, Any]) -> tuple | None:
    run = results["runs"].get(engine["run"], {})
    if "prompts" not in run:
        return None
    return run["prompts"], run["output_len"]


def drift(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Differences of acceptance by position, in standard errors."""
    rates = zip(
        one["acceptance_by_position"], other["acceptance_by_position"], strict=True
    )
    found = []
    for a, b in rates:
        variance = a * (1 - a) / one["drafts"] + b * (1 - b) / other["drafts"]
        found.append((a - b) / sqrt(variance) if variance else 0.0)
    return found
