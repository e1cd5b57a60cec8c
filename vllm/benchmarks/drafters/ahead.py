# SPDX-License-Identifier: Apache-2.0
"""The server that engines are forked from; it imports vLLM meanwhile."""

import multiprocessing
from multiprocessing import forkserver

from vllm.platforms import current_platform

PROCESSES = multiprocessing.get_context("forkserver")
MODULES = ["vllm.benchmarks.drafters.engine", "vllm.v1.engine.core"]


def import_ahead() -> None:
    """Starts it, if it does not run yet."""
    modules = list(MODULES)
    if current_platform.is_cpu():
        # Of others these look at the device, which a fork could then not use.
        modules.append("vllm.v1.worker.cpu_worker")
    PROCESSES.set_forkserver_preload(modules)
    forkserver.ensure_running()
