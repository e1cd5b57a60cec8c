# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests of kernels compiled for a CPU."""

import pytest
from triton.runtime.jit import JITFunction

from vllm.platforms import current_platform
from vllm.triton_utils.compiled import COMPILED

from .twice import Twice

if current_platform.is_cpu():
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for CUDA's streams)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="kernels are not compiled for a CPU here")
    for item in items:
        if not COMPILED and "kernels/cpu" in str(item.path):
            item.add_marker(skip)


@pytest.fixture
def twice(monkeypatch) -> Twice:
    """Compares each kernel launch of the test with the interpreter."""
    checked = Twice(JITFunction.run)
    monkeypatch.setattr(
        JITFunction, "run", lambda *args, **given: checked(*args, **given)
    )
    return checked
