# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: Triton kernels are compiled for a GPU, but not launched.

Triton can compile without a GPU if a target is set. Tests that run with this plugin
fail when they check what a kernel computed. Whether each kernel compiles is written to
the file that `VLLM_TEST_COMPILED` names.
"""

import json
import os
from pathlib import Path

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

HOPPER = GPUTarget("cuda", 90, 32)
MAX_LAUNCHES = 3  # per kernel: each new shape takes half a second


class Driver:
    """What Triton queries of a GPU driver before a launch."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# By kernel: number of launches, and errors of Triton's compiler.
launched: dict[str, int] = {}
errors: dict[str, str] = {}
launch = JITFunction.run


def compile_only(kernel: JITFunction, *args, warmup: bool, **kwargs) -> None:
    backends.pop("cpu", None)
    name = kernel.fn.__qualname__
    launched[name] = launched.get(name, 0) + 1
    if launched[name] <= MAX_LAUNCHES:
        try:
            launch(kernel, *args, warmup=True, **kwargs)
        except Exception as error:
            errors[name] = str(error)


def pytest_sessionfinish() -> None:
    found = {"launched": list(launched), "errors": errors}
    Path(os.environ["VLLM_TEST_COMPILED"]).write_text(json.dumps(found))


# vLLM considers Triton usable on a CPU if it has a backend of that name.
backends["cpu"] = backends["nvidia"]
driver.set_active(Driver())
JITFunction.run = compile_only
