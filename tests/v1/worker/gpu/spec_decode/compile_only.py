# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: Triton's kernels are compiled for a GPU, and not launched.

Triton compiles without a GPU once it is told for which. So a test that runs with this
plugin fails where it looks at what a kernel computed; that each kernel is one that
Triton's compiler takes is written to the file that `VLLM_TEST_COMPILED` names.
"""

import json
import os
from pathlib import Path

from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

HOPPER = GPUTarget("cuda", 90, 32)
MAX_LAUNCHES = 3  # of a kernel; each other shape takes half a second


class Driver:
    """What Triton asks of a GPU before it launches."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


# What became of each kernel: launches, or what Triton's compiler says.
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


# vLLM takes Triton for usable on a CPU if it has a backend of that name.
backends["cpu"] = backends["nvidia"]
driver.set_active(Driver())
JITFunction.run = compile_only
