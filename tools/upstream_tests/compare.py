# SPDX-License-Identifier: Apache-2.0
"""What passes on the release and not here."""

import json
from collections.abc import Iterable
from pathlib import Path


def file_of(test: str) -> str:
    return test.partition("::")[0]


def read(results: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Outcomes by test, "passed" or what else with the reason; how each file ended.

    A test that passes and fails in its teardown has failed.
    """
    outcomes: dict[str, str] = {}
    ended: dict[str, str] = {}
    for name, outcome, reason, *_ in map(json.loads, results.read_text().splitlines()):
        if outcome == "ended":
            ended[name] = reason
        elif outcome == "passed":
            outcomes.setdefault(name, outcome)
        else:
            outcomes[name] = f"{outcome}: {reason}"
    return outcomes, ended


def differences(release: Path, ours: Path, files: Iterable[str]) -> dict[str, str]:
    """Tests of `files` that pass on the release and not here, with what they come to.

    Where the release ran out of time, what it came to is chance: not compared.
    """
    (there, ended_there), (here, ended_here) = read(release), read(ours)
    found = {}
    for test, outcome in there.items():
        file = file_of(test)
        if outcome != "passed" or file not in files:
            continue
        if ended_there.get(file) == "time limit":
            continue
        why = here.get(file) or ended_here.get(file) or "there is no such test here"
        if (came_to := here.get(test, f"did not run: {why}")) != "passed":
            found[test] = came_to
    return found


def report(
    found: dict[str, str], accepted: dict[str, str], files: Iterable[str]
) -> list[str]:
    """A line for each difference that is not accepted, and for each that is accepted,
    is of one of the `files`, and is none any more.

    Args:
        accepted: reasons by the beginning of a test's name.
    """
    used = {name: [t for t in found if t.startswith(name)] for name in accepted}
    known = {test for tests in used.values() for test in tests}
    lines = [f"{test}: {found[test]}" for test in sorted(found.keys() - known)]
    return lines + [
        f"{name}: accepted, and differs no more: take it out of accepted.toml"
        for name, tests in used.items()
        if not tests and file_of(name) in files
    ]
