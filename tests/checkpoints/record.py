# SPDX-License-Identifier: Apache-2.0
"""What tests found of each checkpoint: `python -m tests.checkpoints.record`.

It runs them, and if they pass writes `passed.json`, of which the docs' tables are made.
Arguments go to pytest: `-k trained` renews what those tests found, and keeps the rest.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("passed.json")
TESTS = sorted(FILE.parents[1].rglob("e2e/test_*_drafters.py"))
FOLDER = "VLLM_TEST_RECORD"  # environment: where tests leave what they found
LINE = re.compile(
    r"Drafter .*: family '(?P<family>.*)', method (?P<method>\w+), (?P<drafts>\d+) "
    r"tokens a step, (?P<width>\d+) a pass, mask token (?P<mask>\w+), fed by "
    r"(?P<fed_by>.*)\."
)


def detected(line: str) -> dict[str, str]:
    """What the log's line on a drafter says, by parts."""
    return LINE.fullmatch(line).groupdict()


def acceptance(counters: dict[str, list[int]]) -> dict[str, Any]:
    drafts = counters["num_drafts"][0]
    rates = [n / drafts for n in counters["num_accepted_tokens_per_pos"]]
    return {
        "steps": drafts,
        "acceptance_length": round(1 + sum(rates), 2),
        "acceptance_by_position": [round(rate, 2) for rate in rates],
    }


def note(name: str, **found: Any) -> None:
    """Called by a test, of a checkpoint that it has nothing against."""
    if folder := os.environ.get(FOLDER):
        base, today = version("vllm").partition("+")[0], date.today().isoformat()
        row = found | {"base": base, "date": today}
        Path(folder, f"{name}.json").write_text(json.dumps(row))


def recorded() -> dict[str, dict[str, Any]]:
    """By checkpoint, as far as they have passed."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "pytest", "-q", *map(str, TESTS), *arguments]
        status = subprocess.run(run, env=os.environ | {FOLDER: folder}).returncode
        if status:
            return status
        files = Path(folder).glob("*.json")
        passed = {file.stem: json.loads(file.read_text()) for file in files}
    record = dict(sorted((recorded() | passed).items()))
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
