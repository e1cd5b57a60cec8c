# SPDX-License-Identifier: Apache-2.0
"""What stood for the draft passes of an engine: graphs or none, and waits of the host.

A step counts by what its passes were: "full" if a FULL graph was replayed, else
"piecewise" if a piecewise one was, else "eager".
"""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch

WAIT = "called a synchronizing CUDA operation"


class DraftWatch:
    """Stands before a speculator's `propose`.

    On a GPU `propose` runs where any operation that makes the host wait for the device
    is an error. One that waits is noted, and called again where it may.
    """

    def __init__(self, speculator: Any):
        self.steps: Counter[str] = Counter()  # by what the passes were
        self.waited_at: set[str] = set()  # "module.py:line"
        self.drafted: Counter[int] = Counter()  # steps by draft length, where it varies
        self.passes: Counter[str] = Counter()  # within the current step
        self.is_cuda = speculator.device.type == "cuda"
        if self.is_cuda:
            check_that_waits_are_noticed()
        self.propose = speculator.propose
        speculator.propose = self._watched
        if (graphs := speculator.graphs) is not None:
            self._count_calls(graphs, "run_fullgraph", "full")
            self._count_calls(graphs, "run_pw_graph", "piecewise")

    def _count_calls(self, holder: Any, name: str, what: str) -> None:
        call = getattr(holder, name)

        def counted(*args, **kwargs):
            self.passes[what] += 1
            return call(*args, **kwargs)

        setattr(holder, name, counted)

    def _propose(self, *args, **kwargs):
        self.passes.clear()
        return self.propose(*args, **kwargs)

    def _watched(self, *args, **kwargs):
        drafts, waited_at = call_without_waits(
            self._propose, *args, is_cuda=self.is_cuda, **kwargs
        )
        what = next((w for w in ("full", "piecewise") if self.passes[w]), "eager")
        self.steps[what] += 1
        if (length := kwargs.get("num_speculative_tokens")) is not None:
            self.drafted[length] += 1
        if waited_at is not None:
            self.waited_at.add(waited_at)
        return drafts

    def describe(self) -> dict[str, Any]:
        return {
            "steps": dict(self.steps),
            "drafted": dict(self.drafted),
            "waited_at": sorted(self.waited_at),
        }


def call_without_waits(call, *args, is_cuda: bool, **kwargs) -> tuple[Any, str | None]:
    """What a call returns, and where it first made the host wait; None if nowhere."""
    if not is_cuda:
        return call(*args, **kwargs), None
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call(*args, **kwargs), None
    except RuntimeError as error:
        if WAIT not in str(error):
            raise
        waited_at = place_of(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return call(*args, **kwargs), waited_at


def place_of(error: Exception) -> str:
    """Module and line that raised: "v1/worker/utils.py:7"."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    parts = Path(frame.filename).parts
    names = [i for i, part in enumerate(parts) if part in ("vllm", "torch", "triton")]
    return f"{'/'.join(parts[names[-1] :] if names else parts[-1:])}:{frame.lineno}"


def check_that_waits_are_noticed() -> None:
    """A control: what certainly waits must be told of.

    Raises:
        RuntimeError: it was not.
    """
    number = torch.ones((), device="cuda")
    if call_without_waits(number.item, is_cuda=True)[1] is None:
        raise RuntimeError(
            "torch.cuda.set_sync_debug_mode does not notice Tensor.item: nothing can "
            "be said of what propose waits for"
        )
