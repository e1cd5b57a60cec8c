# SPDX-License-Identifier: Apache-2.0
"""What the device and the host do in a step, from a torch profiler trace."""

import json
import os
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")
DRAFT_PASS = "draft_pass"
SKIPPED_STEPS = 5  # after the last prefill


class ProfileWindow:
    """Profiles some steady steps of a round; `trace` is None until it has."""

    def __init__(self, num_steps: int):
        self.left = num_steps + SKIPPED_STEPS
        self.num_steps = num_steps
        self.profiler: Any = None
        self.trace: list[dict[str, Any]] | None = None

    def after_step(self, is_steady: bool) -> None:
        if not is_steady or self.trace is not None:
            return
        if self.left == self.num_steps:
            self._start()
        elif self.left == 0:
            self._stop()
        self.left -= 1

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        self.profiler = profile(activities=kinds, acc_events=True)
        self.profiler.start()

    def _stop(self) -> None:
        self.profiler.stop()
        self.trace = read_trace(self.profiler)


def read_trace(profiler: Any) -> list[dict[str, Any]]:
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]
    finally:
        os.unlink(path)


def count_launches(call: Callable[[], Any]) -> int:
    """Kernels, copies and fills that a call puts on the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(e.get("cat") in DEVICE_WORK for e in read_trace(profiler))


def summarise(
    trace: list[dict[str, Any]], num_steps: int, top: int = 15
) -> dict[str, Any]:
    """What a step costs; all times in seconds, per step unless said otherwise.

    Args:
        trace: the traceEvents of a Chrome trace, times in microseconds.
        num_steps: engine steps that the trace holds.
    """
    spans = [event for event in trace if event.get("ph") == "X"]
    work = [e for e in spans if e.get("cat") in DEVICE_WORK]
    calls = [e for e in spans if e.get("cat") in HOST_CALLS]
    in_draft = _draft_work(spans, work, calls)
    launched = Counter(event["name"] for event in calls)
    window = _window(work)
    return {
        "steps": num_steps,
        "step_s": window * 1e-6 / num_steps,
        "busy_share": _busy(work) / window if window else None,
        "busy_s": _busy(work) * 1e-6 / num_steps,
        "device_kernels": sum(e["cat"] == "kernel" for e in work) / num_steps,
        "draft_kernels": sum(e["cat"] == "kernel" for e in in_draft) / num_steps,
        "draft_kernels_s": _total(in_draft) / num_steps,
        "target_kernels_s": (_total(work) - _total(in_draft)) / num_steps,
        "host_operations": sum(e.get("cat") == "cpu_op" for e in spans) / num_steps,
        "kernel_launches": _calls(launched, "LaunchKernel") / num_steps,
        "graph_launches": _calls(launched, "GraphLaunch") / num_steps,
        "copies": _calls(launched, "Memcpy") / num_steps,
        "synchronisations": _calls(launched, "Synchronize") / num_steps,
        "device_to_host": sum("DtoH" in e["name"] for e in work) / num_steps,
        "top_kernels": _top(work, num_steps, top),
    }


def _calls(launched: Counter, part: str) -> int:
    return sum(count for name, count in launched.items() if part in name)


def _total(work: list[dict[str, Any]]) -> float:
    return sum(event["dur"] for event in work) * 1e-6


def _window(work: list[dict[str, Any]]) -> float:
    if not work:
        return 0.0
    return max(e["ts"] + e["dur"] for e in work) - min(e["ts"] for e in work)


def _busy(work: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one kernel or copy runs."""
    busy, reached = 0.0, float("-inf")
    for event in sorted(work, key=lambda e: e["ts"]):
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(reached, event["ts"]))
        reached = max(reached, end)
    return busy


def _draft_work(spans, work, calls) -> list[dict[str, Any]]:
    """The device work that was launched from within a draft pass."""
    passes = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in spans
        if e["name"] == DRAFT_PASS and e.get("cat") == "user_annotation"
    )
    begins = [begin for begin, _ in passes]
    launched_at = {
        e["args"]["correlation"]: e["ts"]
        for e in calls
        if "correlation" in e.get("args", {})
    }

    def is_draft(event: dict[str, Any]) -> bool:
        at = launched_at.get(event.get("args", {}).get("correlation"))
        index = bisect_right(begins, at) - 1 if at is not None else -1
        return index >= 0 and at <= passes[index][1]

    return [event for event in work if is_draft(event)]


def _top(work, num_steps: int, top: int) -> list[dict[str, Any]]:
    seconds, counts = defaultdict(float), Counter()
    for event in work:
        seconds[event["name"]] += event["dur"] * 1e-6
        counts[event["name"]] += 1
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:top]
    return [
        {"name": n[:120], "s": seconds[n] / num_steps, "count": counts[n] / num_steps}
        for n in longest
    ]
