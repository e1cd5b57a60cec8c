# SPDX-License-Identifier: Apache-2.0
"""The input kernel's tests on a GPU under compute-sanitizer; see README.md.

First a kernel that writes past a tensor's end is run the same way, which memcheck must
report: else nothing that follows would mean anything.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.device import describe

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/v1/worker/gpu/spec_decode/test_unified_inputs.py"
KERNEL = "_prepare_inputs"
TOOLS = ("memcheck", "racecheck", "synccheck")


CONTROL = "memcheck of a planted write past the end"


def command(tool: str, program: Sequence[str] = ("pytest", "-q", TESTS)) -> list[str]:
    sanitizer = ["compute-sanitizer", "--tool", tool]
    only = ["--kernel-name", f"kernel_substring={KERNEL}"]
    return [*sanitizer, *only, "python3", "-m", *program]


def run(command: list[str], examples: int) -> str:
    """All that it printed."""
    env = os.environ | {
        "VLLM_TEST_EXAMPLES": str(examples),
        # Each tensor has memory of its own: behind its end is none of another's.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return done.stdout + done.stderr


def num_reports(output: str) -> int | None:
    """By a tool's summary; None if it did not come to it."""
    found = re.findall(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    return int(found[-1]) if found else None


def planted_reports(output: str) -> int:
    """Reports of a tool that ran the planted kernel.

    Raises:
        ValueError: it did not report that kernel's write.
    """
    if f"{KERNEL}_planted" not in output or not (found := num_reports(output)):
        raise ValueError(
            "compute-sanitizer did not report a planted write past the end, so its "
            "silence on the input kernel means nothing:\n" + output[-2000:]
        )
    return found


def summarise(output: str) -> dict[str, Any]:
    """What a tool and the tests under it said last.

    Raises:
        ValueError: the tool did not come to its summary.
    """
    reports = num_reports(output)
    passed = re.findall(r"(\d+) passed", output)
    if reports is None or not passed:
        raise ValueError("compute-sanitizer did not finish:\n" + output[-2000:])
    failed = re.findall(r"(\d+) failed", output)
    return {
        "reports": reports,
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
    planted = run(command("memcheck", ["benchmarks.spec_decode.planted"]), 0)
    control = {"reports": planted_reports(planted), "run": name}
    print(CONTROL, control, flush=True)
    found = {}
    for tool in args.tools:
        found[tool] = summarise(run(command(tool), args.examples))
        found[tool] |= {"examples": args.examples, "run": name}
        print(tool, found[tool], flush=True)
    folder = files.RESULTS / files.slug(device["name"])
    entry = {"command": shlex.join(command("TOOL")), "device": device}
    files.save(
        args.output or folder / "sanitizer.json",
        {"runs": {name: entry}, "measurements": {**found, CONTROL: control}},
    )
    if any(row["reports"] or row["tests_failed"] for row in found.values()):
        sys.exit("compute-sanitizer or a test under it found errors")


if __name__ == "__main__":
    main()
