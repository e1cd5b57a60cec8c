# SPDX-License-Identifier: Apache-2.0
"""The target and the drafter inside an engine of either runner, and their clocks."""

import time
from collections import Counter
from statistics import median
from typing import Any

import torch
import torch.nn as nn

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


def bytes_read(model: Any) -> int:
    """Bytes of weights that a pass reads once: all but tables rows are picked from."""
    while hasattr(model, "unwrap"):
        model = model.unwrap()
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


def model_of(drafter: Any) -> nn.Module | None:
    return getattr(drafter, "model", None)


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
