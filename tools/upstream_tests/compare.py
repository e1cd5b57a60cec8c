# SPDX-License-Identifier: Apache-2.0
"""What passes on the release and not here."""

import json
from collections.abc import Iterable
from pathlib import Path

Outcomes = dict[str, str]  # by test; by file, how it ended or why it has no tests


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read(results: Path) -> Outcomes:
    """What the worker wrote. What passes and fails in its teardown has failed."""
    outcomes: Outcomes = {}
    for name, outcome in map(json.loads, results.read_text().splitlines()):
        if outcomes.get(name, "passed") == "passed":
            outcomes[name] = outcome
    return outcomes


def differences(release: Outcomes, ours: Outcomes) -> Outcomes:
    """Tests that pass on the release and not here, with what they come to.

    Where the release ran out of time, what it came to is chance: not compared.
    """
    found = {}
    for test, outcome in release.items():
        file = file_of(test)
        if outcome == "passed" and release.get(file) != "time limit":
            why = ours.get(file) or "there is no such test here"
            if (came_to := ours.get(test, f"did not run: {why}")) != "passed":
                found[test] = came_to
    return found


def report(found: Outcomes, accepted: Iterable[str], files: Iterable[str]) -> list[str]:
    """A line for each difference whose name begins with none of the accepted names,
    and for each of these that is of one of the `files` and is needed no more."""
    stale = [
        f"{name}: accepted, and differs no more: take it out of accepted.toml"
        for name in accepted
        if file_of(name) in files and not any(t.startswith(name) for t in found)
    ]
    known = tuple(accepted)
    return stale + [
        f"{t}: {found[t]}" for t in sorted(found) if not t.startswith(known)
    ]
