# SPDX-License-Identifier: Apache-2.0
"""One run of a benchmark: saves each result at once, and has a time limit."""

import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.models import ROOT

PLACES = ("--output", "--site")  # flags that say where files are


def command_line(benchmark: str) -> str:
    """The command without paths; $SITES stands for the sites, as in README.md."""
    words, given = ["python -m benchmarks.spec_decode." + benchmark], sys.argv[1:]
    if any(word.startswith("--site") for word in given):
        words.append("$SITES")
    rest = iter(given)
    for word in rest:
        if word in PLACES:
            next(rest)
        elif word.partition("=")[0] not in PLACES:
            words.append(shlex.quote(word))
    return " ".join(words)


def describe_device() -> dict[str, Any]:
    """Name and memory of the GPU, "cpu" without one, and the software's versions."""
    import torch

    import vllm

    found: dict[str, Any] = {"name": "cpu", "memory_bytes": 0}
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found = {"name": gpu.name, "memory_bytes": gpu.total_memory}
    return found | {"torch": torch.__version__, "vllm": vllm.__version__}


def probe_device(python: list[str], env: dict[str, str]) -> dict[str, Any]:
    """The same, in another process, so that this one does not use the device."""
    code = "from benchmarks.spec_decode import run; import json; "
    command = [*python, "-c", code + "print(json.dumps(run.describe_device()))"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The device could not be probed: {last_error(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


class Run:
    """The results of one run, saved as they are found.

    Args:
        benchmark: its module, and the default name of the results file.
        output: another results file.
        time_limit: seconds after which `is_over` is true.
    """

    def __init__(
        self,
        benchmark: str,
        device: dict[str, Any],
        output: Path | None = None,
        time_limit: float = float("inf"),
    ):
        self.begin, self.time_limit = time.monotonic(), time_limit
        self.name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        folder = re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")
        self.path = output or files.RESULTS / folder / f"{benchmark}.json"
        run = {"command": command_line(benchmark), "device": device}
        self.results: files.Results = {"runs": {self.name: run}}
        self.say(f"results: {self.path}")

    def is_over(self, needed_s: float = 0.0) -> bool:
        return time.monotonic() - self.begin + needed_s > self.time_limit

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def record(self, section: str, key: object, found: dict[str, Any]) -> None:
        rows = self.results.setdefault(section, {})
        rows[str(key)] = {**found, "run": self.name}
        files.save(self.path, self.results)

    def fail(self, key: object, error: Exception) -> None:
        self.say(f"{key}: FAILED: {error}")


def start_process(
    command: list[str], env: dict[str, str], log: Path, **more: Any
) -> subprocess.Popen:
    """Starts a process in a process group of its own, with its output in a log."""
    with log.open("w") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **more,
        )


def stop_process(process: subprocess.Popen) -> None:
    """Ends a process and all that it started; waits until its memory is free."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)


def last_error(log: str) -> str:
    """The line of a log that most likely says why a process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return (errors or lines or ["ended without a word"])[-1][:500]
