# SPDX-License-Identifier: Apache-2.0
"""The target and the drafter inside an engine of either runner, and their clocks."""

import time
from collections import Counter
from statistics import median
from typing import Any

import torch

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)


def find_drafter(runner: Any) -> Any | None:
    """What has a `propose`: Runner V2's speculator, Runner V1's drafter."""
    return getattr(runner, "speculator", None) or getattr(runner, "drafter", None)


def set_acceptance(runner: Any, rates: list[float]) -> None:
    """Changes the chance of each draft to be accepted where those before it were.

    Does nothing in an engine that verifies its drafts.
    """
    held = runner.rejection_sampler.synthetic_conditional_rates
    if held is not None:
        held.copy_(torch.tensor(rates, dtype=held.dtype))


def bytes_read(model: Any) -> int | None:
    """Bytes of weights that a pass reads once: all but tables rows are picked from.

    None for a mixture of experts: it reads those that its tokens are routed to.
    """
    while hasattr(model, "unwrap"):
        model = model.unwrap()
    if any(isinstance(module, RoutedExperts) for module in model.modules()):
        return None
    heads = {
        parameter.data_ptr()
        for module in model.modules()
        if isinstance(module, ParallelLMHead)
        for parameter in module.parameters(recurse=False)
    }
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    sizes = {}
    for module in model.modules():
        picked = type(module) is VocabParallelEmbedding and not tied
        for parameter in module.parameters(recurse=False):
            if not picked or parameter.data_ptr() in heads:
                sizes[parameter.data_ptr()] = parameter.nbytes
    return sum(sizes.values())


def drafter_name(drafter: Any) -> str | None:
    """Which kind of drafter: that of the unified speculator, or the class itself."""
    return type(getattr(drafter, "drafter", drafter)).__name__ if drafter else None


def draft_bytes_read(drafter: Any) -> int:
    """The same of a drafter's model, and of PARD-2's projection beside it."""
    if (model := getattr(drafter, "model", None)) is None:
        return 0
    projection = getattr(getattr(drafter, "drafter", None), "weight", None)
    return bytes_read(model) + (0 if projection is None else projection.nbytes)


def count_full_graphs(holder: Any, name: str) -> int | None:
    """FULL graphs that a runner or drafter recorded; None where that is not known."""
    manager = getattr(holder, name, None)
    return None if manager is None else len(manager.graphs)


class DraftClock:
    """Times every `propose` on the device, without waiting for it."""

    def __init__(self, drafter: Any, device: str):
        self.is_cuda = device == "cuda"
        self.calls: list[tuple[float, int | None, Any, Any]] = []
        self.propose = drafter.propose
        drafter.propose = self._timed

    def _timed(self, *args, **kwargs):
        called, begin = time.perf_counter(), self._mark()
        with torch.profiler.record_function("draft_pass"):
            drafts = self.propose(*args, **kwargs)
        length = kwargs.get("num_speculative_tokens")
        self.calls.append((called, length, begin, self._mark()))
        return drafts

    def _mark(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, begin: float, end: float) -> tuple[float | None, dict[int, int]]:
        """Forgets all calls; tells of those between two moments.

        Returns:
            Median seconds of a call, and how many calls drafted how many tokens, where
            the runner chooses for each step.
        """
        if self.is_cuda:
            torch.cuda.synchronize()
        calls = [call for call in self.calls if begin <= call[0] <= end]
        self.calls.clear()
        seconds = [self._between(*marks) for _, _, *marks in calls]
        drafted = Counter(length for _, length, *_ in calls if length is not None)
        return median(seconds) if seconds else None, drafted

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self.is_cuda else end - begin
