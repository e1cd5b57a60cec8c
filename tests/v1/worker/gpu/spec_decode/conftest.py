# SPDX-License-Identifier: Apache-2.0
"""Imports what Runner V2's modules need before they are imported. Kernels must not be
interpreted: that would hide that one no longer compiles for a CPU."""

import pytest

from vllm.platforms import current_platform
from vllm.triton_utils.interpreting import COMPILED

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for CUDA's streams)


@pytest.fixture(autouse=True)
def kernels_are_compiled(monkeypatch):
    if COMPILED:
        from vllm.triton_utils.cpu import kernels

        monkeypatch.delattr(kernels, "interpret")
