# SPDX-License-Identifier: Apache-2.0
"""A worker process: commands in, answers out, one line of JSON each."""

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """A worker refused a command, was too slow or ended."""


class WorkerProcess:
    """Started at once; the answer to its job is read by `answer`.

    Args:
        python: interpreter with its first arguments.
        job: the first line that it is sent.
        log: where its output goes.
    """

    def __init__(
        self, python: list[str], env: dict[str, str], job: dict[str, Any], log: Path
    ):
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [*python, "-m", "benchmarks.spec_decode.worker"],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self.send(job)

    def send(self, message: dict[str, Any]) -> None:
        # A worker that ended is noticed where its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerError: the answer is an error, or there is none in time.
        """
        line = self._read_line(time.monotonic() + timeout_s)
        if line is None:
            raise WorkerError(f"no answer within {timeout_s:.0f} s, see {self.log}")
        if not line:
            raise WorkerError(last_error(self.log.read_text(errors="replace")))
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def _read_line(self, deadline: float) -> bytes | None:
        """A line; empty at the end of the stream, None past the deadline."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
        return self.process.stdout.readline()

    def ask(self, timeout_s: float, **command: Any) -> dict[str, Any]:
        self.send(command)
        return self.answer(timeout_s)

    def stop(self) -> None:
        """Ends it and all that it started; waits until its memory is free."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def last_error(log: str) -> str:
    """The line of a log that says best why a process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return (errors or lines or ["ended without a word"])[-1][:500]
