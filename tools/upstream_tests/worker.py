# SPDX-License-Identifier: Apache-2.0
"""`python -P worker.py SOURCE LIMIT JOBS RESULTS FILE...`: runs upstream's test files
on the vLLM in front of PYTHONPATH, each for at most LIMIT seconds.

Each file has a process of its own, a fork of this one, which has imported what
upstream's conftest imports anyhow: no file sees what another one patched, a crash or a
hang ends one file alone, and ten seconds of imports are spent once. A line of RESULTS
is [test, outcome], or [file, how it ended], empty where it came to its end.
"""

import gc
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
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
        import_module("numpy").random.seed(0)
        import_module("torch").manual_seed(0)

    def pytest_runtest_logreport(self, report) -> None:
        if report.outcome != "passed":
            reason = report.longreprtext.strip().splitlines() or [""]
            write(self.results, report.nodeid, f"{report.outcome}: {reason[-1][:300]}")
        elif report.when == "call":
            write(self.results, report.nodeid, "passed")

    pytest_collectreport = pytest_runtest_logreport


def write(results: Path, name: str, outcome: str) -> None:
    with results.open("a") as file:
        print(json.dumps([name, outcome]), file=file)


def prepare(source: Path) -> None:
    """Imports what all tests need, and has upstream's tests take a CPU."""
    if os.environ["TRITON_INTERPRET"] == "1":
        backends = import_module("triton.backends").backends
        backends.setdefault("cpu", mock.Mock())  # else vLLM turns Triton off
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(source)
    sys.path.insert(0, str(source))
    import_module("tests.conftest")
    if import_module("vllm.platforms").current_platform.is_cpu():
        utils = import_module("tests.utils")
        utils.get_attn_backend_list_based_on_platform = lambda: ["CPU_ATTN"]
    # Upstream collects garbage after each test. Of the test's own alone that is fast.
    gc.freeze()
    gc.unfreeze = lambda: None


def run_file(file: str, results: Path) -> None:
    """All that a child does. Threads that tests leave behind do not keep it."""
    os.setsid()  # so that what the tests start is ended with them
    log = results.with_suffix("") / file.replace("/", ".").replace(".py", ".log")
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    recorder = Recorder(results)
    import_module("pytest").main([*OPTIONS, *PLUGINS, file], plugins=[recorder])
    sys.stdout.flush()
    os._exit(0)


def end(child: BaseProcess) -> str:
    """Ends a child and what it started. How it ended, "" for by itself."""
    late = child.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    code = child.exitcode
    return "time limit" if late else (code and f"exit status {code}") or ""


def main(source: Path, limit: float, jobs: int, results: Path, *files: str) -> None:
    prepare(source)
    waiting, running = list(files), {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                arguments = waiting.pop(0), results
                child = get_context("fork").Process(target=run_file, args=arguments)
                child.start()
                running[child] = arguments[0], time.monotonic() + limit
            connection.wait([child.sentinel for child in running], timeout=1)
            for child, (file, latest) in list(running.items()):
                if not child.is_alive() or time.monotonic() > latest:
                    write(results, file, end(child))
                    del running[child]
    finally:
        for child in running:
            end(child)


if __name__ == "__main__":
    source, limit, jobs, results, *files = sys.argv[1:]
    main(Path(source), float(limit), int(jobs), Path(results), *files)
