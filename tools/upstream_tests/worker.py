# SPDX-License-Identifier: Apache-2.0
"""`python -P worker.py SOURCE RESULTS LIMIT JOBS FILE...`: runs upstream's test files
on the vLLM in front of PYTHONPATH, each for at most LIMIT seconds.

Each file has a process of its own, a fork of this one, which has imported what
upstream's conftest imports anyhow: no file sees what another one patched, a crash or a
hang ends one file alone, and ten seconds of imports are spent once. A line of RESULTS
is [test, outcome, last line of the reason], or [file, "ended", how, seconds].
"""

import gc
import importlib
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

OPTIONS = ["-q", "-rN", "--tb=short", "-p", "no:cacheprovider", "-W", "ignore"]
PLUGINS = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"]  # not all there are


class Recorder:
    """A pytest plugin: writes each outcome as soon as it is known."""

    def __init__(self, results: Path) -> None:
        self.results = results

    def pytest_runtest_setup(self) -> None:
        """Equal random numbers on both sides, for tests that draw their input."""
        random.seed(0)
        importlib.import_module("numpy").random.seed(0)
        importlib.import_module("torch").manual_seed(0)

    def pytest_runtest_logreport(self, report) -> None:
        if report.when == "call" or report.outcome != "passed":
            reason = report.longreprtext.strip().splitlines() or [""]
            write(self.results, report.nodeid, report.outcome, reason[-1][:300])

    def pytest_collectreport(self, report) -> None:
        if report.outcome != "passed":
            self.pytest_runtest_logreport(report)


def write(results: Path, *line: str | float) -> None:
    with results.open("a") as file:
        print(json.dumps(line), file=file)


def prepare(source: Path) -> None:
    """Imports what all tests need, and has upstream's tests take a CPU."""
    if os.environ["TRITON_INTERPRET"] == "1":
        backends = importlib.import_module("triton.backends").backends
        backends.setdefault("cpu", mock.Mock())  # else vLLM turns Triton off
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, str(source))
    importlib.import_module("tests.conftest")
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        utils = importlib.import_module("tests.utils")
        utils.get_attn_backend_list_based_on_platform = lambda: ["CPU_ATTN"]
    # Upstream collects garbage after each test. Of the test's own alone that is fast.
    gc.freeze()
    gc.unfreeze = lambda: None


def run_file(file: str, results: Path) -> None:
    """All that a child does. Threads that tests leave behind do not keep it."""
    import pytest

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # so that what the tests start is ended with them
    log = results.with_suffix("") / file.replace("/", ".").replace(".py", ".log")
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    pytest.main([*OPTIONS, *PLUGINS, file], plugins=[Recorder(results)])
    sys.stdout.flush()
    os._exit(0)


def start(file: str, results: Path) -> BaseProcess:
    child = get_context("fork").Process(target=run_file, args=(file, results))
    child.start()
    return child


def end(child: BaseProcess) -> str:
    """Ends a child and what it started. How it ended, "" for by itself."""
    late = child.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    code = child.exitcode
    return "time limit" if late else (code and f"exit status {code}") or ""


def main(source: Path, results: Path, limit: float, jobs: int, *files: str) -> None:
    os.chdir(source)
    prepare(source)
    waiting, running = list(files), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                file = waiting.pop(0)
                running[start(file, results)] = file, time.monotonic()
            connection.wait([child.sentinel for child in running], timeout=1)
            for child, (file, began) in list(running.items()):
                seconds = time.monotonic() - began
                if not child.is_alive() or seconds > limit:
                    write(results, file, "ended", end(child), round(seconds, 1))
                    del running[child]
    finally:
        for child in running:
            end(child)


if __name__ == "__main__":
    source, results, limit, jobs, *files = sys.argv[1:]
    main(Path(source), Path(results), float(limit), int(jobs), *files)
