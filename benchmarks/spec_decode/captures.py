# SPDX-License-Identifier: Apache-2.0
"""Time and memory that recording CUDA graphs takes, on either side."""

import time
from importlib import import_module
from typing import Any

import torch

# Runner V2's and Runner V1's.
RUNNERS = ("vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner")


class Captures:
    """Watches every engine that is made from now on in this process.

    Attributes:
        found: by "all" and, of them, "drafter": seconds, and the bytes that this
            process reserved. What is free on a device is up to its other engines too.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        for module in RUNNERS:
            runner = import_module(module).GPUModelRunner
            runner.capture_model = self._watched(runner.capture_model)

    def _watched(self, capture):
        def watched(runner, *args, **kwargs):
            speculator = getattr(runner, "speculator", None)
            if speculator is not None:
                record = speculator.capture
                speculator.capture = lambda *a, **k: self.time(
                    "drafter", record, *a, **k
                )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return self.time("all", capture, runner, *args, **kwargs)

        return watched

    def time(self, what: str, call, *args, **kwargs) -> Any:
        before, begin = reserved_bytes(), time.perf_counter()
        result = call(*args, **kwargs)
        seconds = time.perf_counter() - begin
        taken = reserved_bytes() - before
        self.found[what] = {"s": seconds, "reserved_bytes": taken}
        return result


def reserved_bytes() -> int:
    """Of the GPU's memory, by this process' allocator; 0 without one."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
