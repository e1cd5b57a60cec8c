# SPDX-License-Identifier: Apache-2.0
"""What `try` found, kept in results.json: docs/upstreaming.md and the pull-request
texts take it from there."""

import json
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.overlay.base import ROOT, load_config
from tools.overlay.provenance import provenance, source_of

RESULTS = Path(__file__).with_name("results.json")
WHOLE = "all"  # in place of a title
WHOLE_NAME = "all of them, after the last"
NAMES = {"each": "Each on those before it", "whole": "All of them"}
OUTCOMES = ("passed", "failed", "skipped", "errors")


@dataclass(frozen=True)
class Tried:
    """What came of one patch on those before it, or of all together.

    Attributes:
        title: of the patch; WHOLE where it is all of them.
        modules: how many it adds or changes, all of which were imported.
        broken: of them those that cannot be imported, and why.
        counts: number of tests by outcome, one of OUTCOMES.
        test_files: how many it brings; None in what was recorded without.
    """

    title: str
    modules: int
    broken: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    test_files: int | None = None

    @property
    def is_good(self) -> bool:
        bad = self.counts.get("failed", 0) + self.counts.get("errors", 0)
        return not self.broken and not bad


def counted(said: str) -> dict[str, int]:
    """Outcomes by the last line of pytest, such as `1 failed, 20 passed in 3.1s`."""
    last = (said.strip().splitlines() or [""])[-1]
    found = re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", last)
    return {name + "s" * (name == "error"): int(number) for number, name in found}


def record(
    tried: Iterable[Tried], options: list[str], device: str, path: Path = RESULTS
) -> None:
    """Keeps a run: of each patch, or of the whole, in the place of the one before."""
    tried = list(tried)
    known = json.loads(path.read_text()) if path.is_file() else {}
    kind = "whole" if [one.title for one in tried] == [WHOLE] else "each"
    known[kind] = {
        "base": load_config(ROOT)["version"],
        "device": device,
        **provenance(path),
        "pytest_options": options,
        "examples": os.environ.get("VLLM_TEST_EXAMPLES"),
        "results": [asdict(one) for one in tried],
    }
    path.write_text(json.dumps(known, indent=2) + "\n")


def load(path: Path = RESULTS) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def sentence(title: str, runs: dict[str, Any]) -> str:
    """What a pull-request text says of a patch; nothing where it was not tried."""
    run = runs.get("each", {"results": []})
    for found in run["results"]:
        if found["title"] == title:
            return (
                f"On {run['base']} and the patches before it, on a {run['device']} "
                f"machine, {run['date']}{_pytest(run)}: {outcome(found)}."
            )
    return ""


def whole_sentence(runs: dict[str, Any]) -> str:
    """What a pull-request text says of all patches together; nothing if not tried."""
    run = runs.get("whole")
    if run is None:
        return ""
    (found,) = run["results"]
    return (
        f"The whole series on {run['base']}, on a {run['device']} machine, "
        f"{run['date']}{_pytest(run)}: {outcome(found)}."
    )


def outcome(found: dict[str, Any]) -> str:
    counts = found["counts"]
    parts = [f"{counts[name]} {name}" for name in OUTCOMES if counts.get(name)]
    tests = ", ".join(parts) or "none"
    broken = len(found["broken"])
    imports = f"{found['modules'] - broken} of {found['modules']} modules import"
    return f"{imports}; tests: {tests}"


def result_table(path: Path = RESULTS) -> str:
    """Each patch, and all of them, for the docs."""
    rows, notes = ["| patch | result |", "| --- | --- |"], []
    for kind, run in sorted(load(path).items()):
        for found in run["results"]:
            what = WHOLE_NAME if found["title"] == WHOLE else found["title"]
            rows.append(f"| {what} | {outcome(found)} |")
        notes.append(_note(NAMES[kind], run))
    return "\n".join(rows) + "\n\n" + "\n".join(notes)


def _note(what: str, run: dict[str, Any]) -> str:
    on = f"on {run['base']} and a {run['device']} machine, {run['date']}"
    return f"{what}: {on}, from {source_of(run)}{_pytest(run)}."


def _pytest(run: dict[str, Any]) -> str:
    """How it was run: what a count of tests leaves out is part of it."""
    how = [shlex.join(run["pytest_options"])] if run["pytest_options"] else []
    how += [f"VLLM_TEST_EXAMPLES={run['examples']}"] if run["examples"] else []
    return f", pytest with `{' '.join(how)}`" if how else ""
