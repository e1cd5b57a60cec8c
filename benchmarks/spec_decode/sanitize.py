# SPDX-License-Identifier: Apache-2.0
"""The input kernel's tests on a GPU under compute-sanitizer; see README.md."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.device import describe

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/v1/worker/gpu/spec_decode/test_unified_inputs.py"
KERNEL = "_prepare_inputs"
TOOLS = ("memcheck", "racecheck", "synccheck")


def command(tool: str) -> list[str]:
    sanitizer = ["compute-sanitizer", "--tool", tool]
    only = ["--kernel-name", f"kernel_substring={KERNEL}"]
    return [*sanitizer, *only, "python3", "-m", "pytest", "-q", TESTS]


def summarise(output: str) -> dict[str, Any]:
    """What a tool and the tests under it said last.

    Raises:
        ValueError: the tool did not come to its summary.
    """
    found = re.findall(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    passed = re.findall(r"(\d+) passed", output)
    if not found or not passed:
        raise ValueError("compute-sanitizer did not finish:\n" + output[-2000:])
    failed = re.findall(r"(\d+) failed", output)
    return {
        "reports": int(found[-1]),
        "tests_passed": int(passed[-1]),
        "tests_failed": int(failed[-1]) if failed else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    add("--examples", type=int, default=200, help="random batches per test")
    add("--output", type=Path)
    args = parser.parse_args()
    device = describe()
    name = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    env = os.environ | {"VLLM_TEST_EXAMPLES": str(args.examples)}
    found = {}
    for tool in args.tools:
        done = subprocess.run(
            command(tool), cwd=ROOT, env=env, capture_output=True, text=True
        )
        found[tool] = summarise(done.stdout + done.stderr)
        found[tool] |= {"examples": args.examples, "run": name}
        print(tool, found[tool], flush=True)
    folder = files.RESULTS / files.slug(device["name"])
    run = {"command": shlex.join(command("TOOL")), "device": device}
    files.save(
        args.output or folder / "sanitizer.json",
        {"runs": {name: run}, "measurements": found},
    )
    if any(row["reports"] or row["tests_failed"] for row in found.values()):
        sys.exit("compute-sanitizer or a test under it found errors")


if __name__ == "__main__":
    main()
