# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.ci.counts JUNIT... --output FILE`: what a run of tests came to.

Counts by test file, what did not pass by its name, and what it ran on, as JSON. The
JUnit files are what `pytest --junitxml` writes, one or several that ran side by side.
"""

import argparse
import json
import platform
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.ci.counts", description=__doc__)
    parser.add_argument("junit", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    found = summary([case for junit in args.junit for case in cases(junit)])
    args.output.write_text(json.dumps(surroundings() | found, indent=1) + "\n")
    print(f"{args.output}: {found['total']}")
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
