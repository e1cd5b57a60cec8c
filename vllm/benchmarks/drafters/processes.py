# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, which get commands through a pipe. An engine's
device memory is freed with its process."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm import logger as vllm_logger
from vllm.benchmarks.drafters.engine import Engine, Round
from vllm.benchmarks.drafters.turns import GO, PAUSED
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

STOP_S = 20
# Forked, since importing vLLM takes longer than to start a small engine: on a CPU from
# this process, elsewhere from one that does not access the device.
PROCESSES = multiprocessing.get_context(
    "fork" if current_platform.is_cpu() else "forkserver"
)
MODULES = ("vllm.benchmarks.drafters.processes", "vllm.v1.engine.core")
# These access the device on other platforms.
CPU_MODULES = (
    "vllm.entrypoints.common.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
)
NUM_THREADS = torch.get_num_threads()
# Each is called once in a process, and a forked one would take over what was said.
SAID_ONCE = (
    vllm_logger._print_debug_once,
    vllm_logger._print_info_once,
    vllm_logger._print_warning_once,
    vllm_logger._print_error_once,
)
_pipes: set[Connection] = set()  # of this process; a forked one has them too


class EngineError(RuntimeError):
    """An engine did not start, or ended."""


def import_ahead() -> None:
    """Imports what each engine needs where they are forked from. To be called before
    configs are made."""
    if current_platform.is_cpu():
        # OpenMP hangs in a forked process if this one has run a loop in parallel.
        torch.set_num_threads(1)
        for name in MODULES + CPU_MODULES:
            import_module(name)
    else:
        PROCESSES.set_forkserver_preload([*MODULES])
        forkserver.ensure_running()


class EngineProcess:
    """An `Engine` in its own process. The process is started at once, and the engine
    by its first command.

    Args:
        env: environment variables of the process, beside the existing ones.
        log: file for the engine's output.
    """

    def __init__(self, engine_args: EngineArgs, env: dict[str, str], log: Path):
        self.log = log
        self.pipe, theirs = PROCESSES.Pipe()
        _pipes.add(self.pipe)
        with theirs:
            args = (theirs, engine_args, env, log)
            self.process = PROCESSES.Process(target=serve, args=args)
            self.process.start()

    def ask(self, command: str, **args: Any) -> Any:
        """Calls a method of the engine, and returns its result.

        Raises:
            EngineError: it failed, or the engine did not start.
        """
        self.tell((command, args))
        return self.hear()

    def tell(self, message: Any) -> None:
        with contextlib.suppress(ConnectionError):  # `hear` says what happened
            self.pipe.send(message)

    def hear(self) -> Any:
        """What the engine says next.

        Raises:
            EngineError: it failed, or the engine did not start.
        """
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join(STOP_S)
            answer = EngineError(f"it ended, exit status {self.process.exitcode}")
        if isinstance(answer, EngineError):
            raise EngineError(f"{answer} ({self.log} has all that it said)")
        return answer

    def stop(self) -> None:
        """Ends it and its workers; waits until its memory is free."""
        self.pipe.close()
        _pipes.discard(self.pipe)
        self.process.join(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
            # Its workers are in its process group, and hold the device until they end.
            end = time.monotonic() + STOP_S
            while time.monotonic() < end:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)


def take_turns(*asked: tuple[EngineProcess, dict[str, Any]]) -> list[Round]:
    """Runs a round on each of several engines, in turns.

    Args:
        asked: the engines, and the arguments of `Engine.run`.

    Raises:
        EngineError: an engine failed; the others have ended their rounds.
    """
    found: dict[int, Round | EngineError] = {}
    for engine, args in asked:
        engine.tell(("run", {**args, "in_turns": True}))
    while len(found) < len(asked):
        for number, (engine, _) in enumerate(asked):
            if number in found:
                continue
            engine.tell(GO)
            try:
                heard = engine.hear()
            except EngineError as error:
                heard = error
            if heard != PAUSED:
                found[number] = heard
    for heard in found.values():
        if isinstance(heard, EngineError):
            raise heard
    return [found[number] for number in range(len(asked))]


def resolve_ahead(engine_args: EngineArgs) -> None:
    """Resolves the config, without the device, on which another engine may still run.

    vLLM caches what takes seconds of that, such as inspecting a model's class. Errors
    are left to the start of the engine.
    """
    with contextlib.suppress(Exception):
        engine_args.create_engine_config(UsageContext.LLM_CLASS)


def serve(
    pipe: Connection, engine_args: EngineArgs, env: dict[str, str], log: Path
) -> None:
    """Runs commands until the other end of the pipe is closed."""
    os.setsid()
    for own in _pipes:  # else no engine would see that the other end is closed
        own.close()
    for once in SAID_ONCE:
        once.cache_clear()
    tqdm.set_lock(threading.RLock())  # an engine that is killed may hold the common one
    torch.set_num_threads(NUM_THREADS)
    # As in vLLM's other processes. Locks then need no names, which could outlive them.
    multiprocessing.set_start_method("fork", force=True)
    # A start collects garbage ten times; vLLM's modules need not be searched for it.
    gc.freeze()
    os.environ.update(env, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if not current_platform.is_cpu():  # where other engines need all cores
        resolve_ahead(engine_args)
    engine = None
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            command, args = pipe.recv()
            try:
                engine = engine or Engine(engine_args, pipe)
                answer = getattr(engine, command)(**args)
            except Exception as error:
                traceback.print_exc()
                answer = EngineError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
    if engine is not None:
        engine.end()
    # A normal exit would free memory object by object, which takes a second.
    os._exit(0)
