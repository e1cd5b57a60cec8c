# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's test files, each in a process of its own. A script:

`python -P worker.py SOURCE RESULTS LIMIT JOBS < FILES`, with the tree to test in front
of PYTHONPATH and a time limit for each file, in seconds. A file's process is a fork of
this one, which has imported what upstream's conftest imports anyhow. So no file sees
what another one patched, a crash or a hang ends one file alone, and ten seconds of
imports are spent once. RESULTS gets a line for each outcome as soon as it is known.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

OPTIONS = ["-q", "-rN", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]


class Recorder:
    """A pytest plugin: [test, outcome, last line of the reason] for each report."""

    def __init__(self, results: Path) -> None:
        self.results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self._write(report)

    def _write(self, report: Any) -> None:
        reason = report.longreprtext.strip().splitlines() or [""]
        write(self.results, report.nodeid, report.outcome, reason[-1][:300])


def write(results: Path, *line: str | float) -> None:
    with results.open("a") as file:
        print(json.dumps(line), file=file)


def run_file(source: Path, results: Path, file: str) -> None:
    """What a child does."""
    import pytest

    os.setsid()  # so that what the tests start can be ended with it
    os.chdir(source)
    log = results.with_suffix("") / file.replace("/", ".").replace(".py", ".log")
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    pytest.main([*OPTIONS, file], plugins=[Recorder(results)])
    sys.stdout.flush()
    os._exit(0)  # threads that a test left behind would wait for ever


def end(child: BaseProcess) -> str:
    """Ends a child and what it started; says how, if it did not end by itself."""
    late = child.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    if late:
        return "time limit"
    return f"exit status {child.exitcode}" if child.exitcode else ""


def prepare(source: Path) -> None:
    """Imports what all tests import, and makes upstream's tests take a CPU."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        backends = importlib.import_module("triton.backends").backends
        backends.setdefault("cpu", mock.Mock())  # else vLLM turns Triton off
    sys.path.insert(0, str(source))
    importlib.import_module("tests.conftest")
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        utils = importlib.import_module("tests.utils")
        utils.get_attn_backend_list_based_on_platform = lambda: ["CPU_ATTN"]


def main(source: Path, results: Path, limit: float, jobs: int) -> None:
    waiting = sys.stdin.read().split()
    running: dict[BaseProcess, tuple[str, float]] = {}
    prepare(source)
    fork = multiprocessing.get_context("fork")
    while waiting or running:
        while waiting and len(running) < jobs:
            file = waiting.pop(0)
            child = fork.Process(target=run_file, args=(source, results, file))
            child.start()
            running[child] = file, time.monotonic()
        wait([child.sentinel for child in running], timeout=1)
        for child, (file, start) in list(running.items()):
            seconds = time.monotonic() - start
            if not child.is_alive() or seconds > limit:
                write(results, file, "ended", end(child), round(seconds, 1))
                del running[child]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
