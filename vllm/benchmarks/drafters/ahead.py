# SPDX-License-Identifier: Apache-2.0
"""The server that engines are forked from, which imports vLLM ahead of time."""

import gc
import multiprocessing
import sys
from multiprocessing import forkserver

PROCESSES = multiprocessing.get_context("forkserver")


def import_ahead() -> None:
    """Starts the server, if it is not running yet."""
    # Looking for garbage among this process's imports takes seconds, and finds none.
    gc.disable()
    PROCESSES.set_forkserver_preload(["vllm.benchmarks.drafters.preload"])
    forkserver.ensure_running()


def import_ahead_of_command() -> None:
    """Starts the server if the command is `vllm bench drafters`, before this process
    imports what it needs itself, which takes as long."""
    if sys.argv[1:3] == ["bench", "drafters"] and not {"-h", "--help"} & {*sys.argv}:
        import_ahead()
