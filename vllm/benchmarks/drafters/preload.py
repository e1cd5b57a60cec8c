# SPDX-License-Identifier: Apache-2.0
"""Imported by the server that engines are forked from: the modules that each needs."""

import gc
from importlib import import_module

from vllm.platforms import current_platform

MODULES = ("vllm.benchmarks.drafters.engine", "vllm.v1.engine.core")
# On other platforms these access the device, which a fork could then not use.
CPU_MODULES = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu.model_runner",
    "vllm.v1.worker.cpu_worker",
)

# Imports leave no garbage: looking for it takes a fifth of the time, and seconds more
# when the server ends.
gc.disable()
for name in MODULES + CPU_MODULES * current_platform.is_cpu():
    import_module(name)
gc.freeze()
gc.enable()
