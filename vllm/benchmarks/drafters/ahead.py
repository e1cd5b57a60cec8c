# SPDX-License-Identifier: Apache-2.0
"""The server that engines are forked from; it imports vLLM meanwhile."""

import gc
import multiprocessing
import sys
from multiprocessing import forkserver

PROCESSES = multiprocessing.get_context("forkserver")


def import_ahead() -> None:
    """Starts it, if it does not run yet."""
    # What this process imports is no garbage; to look for some takes seconds.
    gc.disable()
    PROCESSES.set_forkserver_preload(["vllm.benchmarks.drafters.preload"])
    forkserver.ensure_running()


def import_ahead_of_command() -> None:
    """Starts it where the command line asks for a comparison of drafters, before this
    process imports what it needs, which takes as long."""
    if sys.argv[1:3] == ["bench", "drafters"] and not {"-h", "--help"} & {*sys.argv}:
        import_ahead()
