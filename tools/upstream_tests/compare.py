# SPDX-License-Identifier: Apache-2.0
"""Finds what passes on the release and not here."""

import json
from collections.abc import Iterable
from pathlib import Path

Outcomes = dict[str, str]  # by test; by file, how it ended, or why it has no tests


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read(results: Path) -> Outcomes:
    """Reads the worker's results. A test that fails in its teardown has failed."""
    outcomes: Outcomes = {}
    for name, outcome in map(json.loads, results.read_text().splitlines()):
        if outcomes.get(name, "passed") == "passed":
            outcomes[name] = outcome
    return outcomes


def differences(release: Outcomes, ours: Outcomes) -> Outcomes:
    """Tests that pass on the release and not here, with their outcome here.

    Files that reached the time limit on the release are not compared: which of their
    tests ran is chance.
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
    """A line for each difference that is not accepted by a prefix of its name, and for
    each accepted name in `files` that is no longer needed."""
    stale = [
        f"{name}: accepted, and differs no more: take it out of accepted.toml"
        for name in accepted
        if file_of(name) in files and not any(t.startswith(name) for t in found)
    ]
    known = tuple(accepted)
    return stale + [
        f"{t}: {found[t]}" for t in sorted(found) if not t.startswith(known)
    ]
