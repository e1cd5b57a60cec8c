# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, which get commands through a pipe.

A process is an interpreter of any install, so that vLLM's release can be measured
beside this tree. Its device memory is free once it has ended.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STOP_S = 20


class EngineError(RuntimeError):
    """An engine did not start, failed, or ended."""


def start_process(
    command: list[str], env: dict[str, str], log: Path, **more: Any
) -> subprocess.Popen:
    """Starts a process in a session of its own, with its output in a log."""
    with log.open("ab") as out:
        said = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            command, env=env, start_new_session=True, **said, **more
        )


def stop_process(process: subprocess.Popen, wait_s: float = STOP_S) -> None:
    """Ends a process, and all that it started; waits until their memory is free.

    Args:
        wait_s: seconds that it gets to end by itself.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + STOP_S
        while time.monotonic() < end:  # raises once the last of its group has ended
            os.killpg(process.pid, 0)
            time.sleep(0.05)


def last_error(log: str) -> str:
    """The line of a log that most likely says why a process ended."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return (errors or lines or ["it printed nothing"])[-1][:500]


class EngineProcess:
    """An engine in a process of its own, made by the first command.

    Args:
        python: the interpreter, and its options.
        serve: module and name of the function that calls `serve_engine` with the pipe's
            file descriptor.
        engine: arguments of the engine.
        env: all environment variables.
        log: file for the engine's output.
    """

    def __init__(
        self,
        python: list[str],
        serve: tuple[str, str],
        engine: dict[str, Any],
        env: dict[str, str],
        log: Path,
        **more: Any,
    ):
        self.log = log
        self.pipe, other = Pipe()
        with other:
            number = other.fileno()
            code = "from {} import {}; {}({})".format(*serve, serve[1], number)
            command = [*python, "-c", code]
            self.process = start_process(command, env, log, pass_fds=[number], **more)
        self.send(engine)

    def ask(self, command: str, timeout_s: float | None = None, **args: Any) -> Any:
        """Calls a method of the engine, and returns its result.

        Raises:
            EngineError: it failed, did not start, or did not answer in time.
        """
        self.send((command, args))
        return self.answer(timeout_s)

    def send(self, message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # `answer` says what happened
            self.pipe.send(message)

    def answer(self, timeout_s: float | None = None) -> Any:
        """The engine's next answer; raises as `ask` does."""
        try:
            if not self.pipe.poll(timeout_s):
                raise EngineError(f"no answer within {timeout_s:.0f} s, see {self.log}")
            found = self.pipe.recv()
        except (EOFError, ConnectionError):
            why = last_error(self.log.read_text(errors="replace"))
            found = EngineError(f"it ended: {why}")
        if isinstance(found, EngineError):
            raise EngineError(f"{found} (see {self.log})")
        return found

    def wait(self) -> None:
        """Waits until it has answered, or ended."""
        self.pipe.poll(None)

    def stop(self, wait_s: float = STOP_S) -> None:
        """Ends it and its workers; waits until their memory is free."""
        self.pipe.close()
        stop_process(self.process, wait_s)


def serve_engine(number: int, make: Callable[..., Any]) -> None:
    """Makes an engine, and runs commands until the other end of the pipe is closed.

    Args:
        number: file descriptor of the pipe.
        make: makes the engine of its arguments.
    """
    os.set_inheritable(number, False)
    pipe, engine = Connection(number), None
    with contextlib.suppress(EOFError, ConnectionError):
        args = pipe.recv()
        while True:
            command, given = pipe.recv()
            try:
                engine = engine or make(**args)
                answer = getattr(engine, command)(**given)
            except Exception as error:
                traceback.print_exc()
                answer = EngineError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
    if engine is not None:
        engine.end()
    os._exit(0)  # a normal exit frees memory object by object
