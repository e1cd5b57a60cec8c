# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.ci.counts JUNIT... --output FILE`: what a run of tests came to.

Counts by test file, what did not pass by its name, what it ran on and from which
commit, as JSON. The JUnit files are what `pytest --junitxml` writes, one or several
that ran side by side. With `--merge` the test files of this run take the place of what
the output has of them, and its others stay; so run test files whole.
"""

import argparse
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tools.overlay.provenance import provenance

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
SAME = ("base", "device", "software")  # of runs that make one record


class Case(NamedTuple):
    file: str
    name: str
    outcome: str  # passed, failed or skipped


def cases(junit: Path) -> Iterator[Case]:
    """One for each test; a test that fails and then breaks in teardown fails twice."""
    for case in ET.parse(junit).getroot().iter("testcase"):
        if "name" not in case.attrib:
            continue  # a test that was interrupted: it came to nothing
        outcomes = [OUTCOMES[part.tag] for part in case if part.tag in OUTCOMES]
        file = case.get("classname", "").replace(".", "/") + ".py"
        yield Case(file, case.attrib["name"], outcomes[0] if outcomes else "passed")


def summary(found: list[Case]) -> dict[str, Any]:
    by_file: defaultdict[str, Counter] = defaultdict(Counter)
    for case in found:
        by_file[case.file][case.outcome] += 1
    return {
        "total": dict(Counter(case.outcome for case in found)),
        "files": {file: dict(by_file[file]) for file in sorted(by_file)},
        "failed": [f"{c.file}::{c.name}" for c in found if c.outcome == "failed"],
    }


def surroundings() -> dict[str, str]:
    """What the tests ran on: the base, the device, the software, the day."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    packages = (f"{name} {version(name)}" for name in ("torch", "triton"))
    return {
        "base": version("vllm").partition("+")[0],
        "device": device,
        "software": ", ".join((f"Python {platform.python_version()}", *packages)),
        "date": datetime.now(UTC).date().isoformat(),
    }


def sources(files: Iterable[str], output: Path) -> dict[str, dict[str, Any]]:
    """By test file, the commit and the day; nothing where there is no git to ask."""
    try:
        source = provenance(output)
    except (OSError, subprocess.CalledProcessError):
        print("no commit is recorded: run this in a checkout, with git")
        return {}
    return dict.fromkeys(files, source)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` over `old`, test file by test file.

    Raises:
        ValueError: they are not of one base, device and software.
    """
    for what in SAME:
        if old[what] != new[what]:
            raise ValueError(
                f"the record is of {what} {old[what]!r}, this run of {new[what]!r}: "
                "choose another --output"
            )

    def others(key: str) -> list[str]:
        names = old.get(key, ())
        return [n for n in names if n.partition("::")[0] not in new["files"]]

    record = old | new
    for key in ("files", "sources", "why"):
        stay = {name: old[key][name] for name in others(key)}
        record[key] = dict(sorted((stay | new.get(key, {})).items()))
    for key in ("failed", "unfinished"):
        record[key] = others(key) + new.get(key, [])
    record["total"] = dict(sum(map(Counter, record["files"].values()), Counter()))
    return record


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.ci.counts", description=__doc__)
    parser.add_argument("junit", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--merge", action="store_true", help="into what FILE has")
    args = parser.parse_args(argv)
    found = summary([case for junit in args.junit for case in cases(junit)])
    record = surroundings() | found | {"sources": sources(found["files"], args.output)}
    if args.merge and args.output.is_file():
        try:
            record = merged(json.loads(args.output.read_text()), record)
        except ValueError as error:
            parser.error(f"{args.output}: {error}")
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{args.output}: {record['total']}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
