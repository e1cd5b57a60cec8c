# SPDX-License-Identifier: Apache-2.0
"""The summary of a trace."""

import pytest

from benchmarks.spec_decode.gpu_profile import summarise


def event(cat: str, name: str, ts: float, dur: float, correlation=None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


TRACE = [
    event("cpu_op", "aten::add", 11, 1),
    event("user_annotation", "draft_pass", 10, 5),
    event("gpu_user_annotation", "draft_pass", 100, 90),
    event("cuda_runtime", "cudaGraphLaunch", 1, 1, 1),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1, 2),
    event("cuda_runtime", "cudaMemcpyAsync", 20, 1, 3),
    event("cuda_runtime", "cudaEventSynchronize", 22, 1),
    event("kernel", "gemm", 100, 40, 1),
    event("kernel", "gemm", 120, 30, 1),  # overlaps the one before
    event("kernel", "draft", 160, 20, 2),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 190, 10, 3),
    {"ph": "i", "name": "instant"},
]


def test_summary():
    found = summarise(TRACE, num_steps=2)
    assert found["step_s"] == pytest.approx(50e-6)
    assert found["busy_share"] == pytest.approx(0.8)
    assert found["busy_s"] == pytest.approx(40e-6)
    assert found["host_operations"] == 0.5
    assert found["device_kernels"] == 1.5
    assert found["draft_kernels"] == 0.5
    assert found["draft_kernels_s"] == pytest.approx(10e-6)
    assert found["target_kernels_s"] == pytest.approx(40e-6)
    calls = ("kernel_launches", "graph_launches", "copies", "synchronisations")
    assert [found[name] for name in calls] == [0.5] * 4
    assert found["device_to_host"] == 0.5
    assert found["top_kernels"][0] == {
        "name": "gemm",
        "s": pytest.approx(35e-6),
        "count": 1.0,
    }


def test_empty_trace():
    assert summarise([], num_steps=4)["busy_share"] is None
