# SPDX-License-Identifier: Apache-2.0
"""What passes on the release and not here."""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

NO_RESULT = "it did not run"


@dataclass
class Results:
    """Of a run of test files, whole or cut short.

    `outcomes` has passed, failed or skipped by test; `reasons` the last line of what a
    test that did not pass said; `ended` how each file ended that came to its end, ""
    for by itself.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def passed(self) -> set[str]:
        """Not of files that ran out of time: what they came to is chance."""
        chance = {file for file, how in self.ended.items() if how == "time limit"}
        return {
            test
            for test, outcome in self.outcomes.items()
            if outcome == "passed" and file_of(test) not in chance
        }


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read(file: Path) -> Results:
    """Reads what worker.py wrote. A test that passes and then fails in its teardown
    has failed; a file that ran twice counts as it ran last."""
    results = Results()
    for name, outcome, reason, *_ in map(json.loads, file.read_text().splitlines()):
        if outcome == "ended":
            results.ended[name] = reason
        elif outcome != "passed":
            results.outcomes[name] = outcome
            results.reasons[name] = reason
        else:
            results.outcomes.setdefault(name, outcome)
    return results


def differences(release: Results, ours: Results) -> dict[str, str]:
    """Tests that pass on the release and not here, each with what it comes to here."""
    found = {}
    for test in sorted(release.passed()):
        outcome = ours.outcomes.get(test)
        if outcome == "passed":
            continue
        ended = ours.ended.get(file_of(test)) or ours.reasons.get(file_of(test))
        what = outcome or (f"{NO_RESULT} ({ended})" if ended else NO_RESULT)
        reason = ours.reasons.get(test)
        found[test] = f"{what}: {reason}" if reason else what
    return found


def read_accepted(path: Path) -> dict[str, dict[str, str]]:
    """By half, reasons by the beginning of a test's name."""
    return tomllib.loads(path.read_text())


def report(
    found: dict[str, str], accepted: dict[str, str], files: Iterable[str]
) -> list[str]:
    """One line for each difference that is not accepted, and for each accepted one of
    `files` that is no difference any more."""
    lines = [
        f"{test}: {why}"
        for test, why in found.items()
        if not any(test.startswith(name) for name in accepted)
    ]
    for name in accepted:
        gone = not any(test.startswith(name) for test in found)
        if gone and file_of(name) in files:
            lines.append(f"{name}: accepted, but differs no more; remove it")
    return lines
