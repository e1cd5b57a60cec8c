# SPDX-License-Identifier: Apache-2.0
"""What the device and the host do in a step, from a torch profiler trace."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")


@contextmanager
def profiled() -> Iterator[list[dict[str, Any]]]:
    """Yields a list that gets the traceEvents of the block when the block ends."""
    from torch.profiler import ProfilerActivity, profile

    trace: list[dict[str, Any]] = []
    kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds, acc_events=True) as profiler:
        yield trace
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace += json.loads(file.read_text())["traceEvents"]


def summarise(trace: list[dict[str, Any]], num_steps: int) -> dict[str, Any]:
    """Seconds and counts of device work and host calls per step, and GPU busy share.

    Args:
        trace: the traceEvents of a Chrome trace, times in microseconds.
        num_steps: engine steps in the trace.
    """
    spans = [event for event in trace if event.get("ph") == "X"]
    work = [e for e in spans if e.get("cat") in DEVICE_WORK]
    calls = Counter(e["name"] for e in spans if e.get("cat") in HOST_CALLS)
    window = 0.0
    if work:
        window = max(e["ts"] + e["dur"] for e in work) - min(e["ts"] for e in work)

    def called(part: str) -> float:
        return sum(n for name, n in calls.items() if part in name) / num_steps

    return {
        "steps": num_steps,
        "step_s": window * 1e-6 / num_steps,
        "busy_share": busy(work) / window if window else None,
        "device_kernels": sum(e["cat"] == "kernel" for e in work) / num_steps,
        "kernel_launches": called("LaunchKernel"),
        "graph_launches": called("GraphLaunch"),
        "copies": called("Memcpy"),
        "synchronisations": called("Synchronize"),
        "device_to_host": sum("DtoH" in e["name"] for e in work) / num_steps,
        "kernels": longest(work, num_steps),
    }


def longest(work: list[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Seconds per step of the longest kernels by name, and of all Triton kernels."""
    seconds: Counter[str] = Counter()
    for event in work:
        seconds[event["name"][:120]] += event["dur"] * 1e-6 / num_steps
    known = seconds.most_common()
    return dict(known[:15]) | {n: s for n, s in known if n.startswith("_")}


def busy(work: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one kernel or copy runs."""
    total, reached = 0.0, float("-inf")
    for event in sorted(work, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        total += max(0.0, end - max(reached, event["ts"]))
        reached = max(reached, end)
    return total
