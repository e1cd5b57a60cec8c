# SPDX-License-Identifier: Apache-2.0
"""The summary of a trace."""

import pytest

from benchmarks.spec_decode.gpu_profile import summarise


def event(cat: str, name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


TRACE = [
    event("cpu_op", "aten::add", 11, 1),
    event("cuda_runtime", "cudaGraphLaunch", 1, 1),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1),
    event("cuda_runtime", "cudaMemcpyAsync", 20, 1),
    event("cuda_runtime", "cudaEventSynchronize", 22, 1),
    event("kernel", "gemm", 100, 40),
    event("kernel", "gemm", 120, 30),  # overlaps the one before
    event("kernel", "_grow_kernel", 160, 20),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 190, 10),
    {"ph": "i", "name": "instant"},
]


def test_summary():
    found = summarise(TRACE, num_steps=2)
    assert found["step_s"] == pytest.approx(50e-6)
    assert found["busy_share"] == pytest.approx(0.8)
    assert found["device_kernels"] == 1.5
    calls = ("kernel_launches", "graph_launches", "copies", "synchronisations")
    assert [found[name] for name in calls] == [0.5] * 4
    assert found["device_to_host"] == 0.5
    assert found["kernels"]["gemm"] == pytest.approx(35e-6)
    assert found["kernels"]["_grow_kernel"] == pytest.approx(10e-6)
