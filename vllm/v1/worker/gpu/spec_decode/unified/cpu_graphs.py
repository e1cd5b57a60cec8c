# SPDX-License-Identifier: Apache-2.0
"""The recorded passes of a draft model on a CPU: see `cpu_graph.py`.

As on a GPU, passes are padded to some numbers of rows. A row costs time on a CPU, so
these are closer together. But a number of rows that is met for the first time costs
more, even without a recording: vLLM makes a oneDNN primitive for it, and keeps 32 for
all linear layers of a shape.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.worker.gpu.spec_decode.cpu_graph import (
    CPUGraph,
    Memory,
    NotRecordableError,
    are_same,
    copies,
    record,
)

logger = init_logger(__name__)

MOST_ROWS = 128  # with more, kernels take far longer than Python
START_SECONDS = 1.0  # most time of recording before the first request
Key = tuple[Any, ...]
Tensors = list[torch.Tensor | None]
Run = Callable[[], Any]


def padded(num_rows: int) -> int:
    """The next recorded number of rows: all up to 8, every second up to 16, every
    fourth up to 32, and so on."""
    if num_rows > MOST_ROWS:
        return num_rows
    step = 1 << max((num_rows - 1).bit_length() - 3, 0)
    return -(-num_rows // step) * step


def sizes_to_record(most: int) -> list[int]:
    """The numbers of rows that passes of at most so many are padded to.

    Args:
        most: there is no room for more.
    """
    rows = range(1, min(most, MOST_ROWS) + 1)
    return sorted({min(padded(each), most) for each in rows})


@dataclass
class _Recorded:
    """A pass, by what of its inputs is more than the contents of tensors.

    Attributes:
        first: copies of the model's inputs when it was recorded, until it is verified.
            With the same ones verification would find less.
    """

    graph: CPUGraph
    first: Tensors
    is_verified: bool = False


class CPUGraphs:
    """Runs a draft model by recordings of it, after the second pass of a kind.

    Attributes:
        by_key: the passes that were met.
        reason: why nothing is recorded any more.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, _Recorded] = {}
        self.memory = Memory()
        self.reason: str | None = None
        self._layers: list[str] = []

    def record_sizes(self, most: int, run: Callable[[int], None]) -> None:
        """Records passes before the first request, from the smallest on while it takes
        little time; others are recorded when they are met.

        Args:
            most: rows of the largest pass, padding included.
            run: runs a dummy pass of so many rows.
        """
        begin = time.perf_counter()
        for num_rows in sizes_to_record(most):
            run(num_rows)
            if not self.by_key:  # it cannot be recorded
                return
            if time.perf_counter() - begin > START_SECONDS:
                break
        logger.info(
            "Recorded draft passes of %d numbers of rows in %.2f s.",
            len(self.by_key),
            time.perf_counter() - begin,
        )

    def run(
        self, model: nn.Module, inputs: dict[str, torch.Tensor | None], num_rows: int
    ) -> Any:
        """`model(**inputs)`, in vLLM's forward context. The next pass of as many rows
        overwrites what it returns.

        Args:
            num_rows: of inputs, padding included.
        """
        run = partial(model, **inputs)
        if self.reason is not None or num_rows > MOST_ROWS or not self._is_recordable():
            return run()
        given = [*inputs.values()]
        tensors, key = self._read(given, num_rows)
        known = self.by_key.get(key)
        if known is not None and known.is_verified:
            graph = known.graph
            return graph.replay(tensors) if graph.fits(tensors) else run()
        try:
            if known is not None:
                return self._verify(known, run, given, tensors)
            first = copies(given)
            graph = record(run, tensors, self.memory)
            self.by_key[key] = _Recorded(graph, first)
            return graph.output
        except Exception as error:  # a pass that fails by itself does so again below
            self.reason, self.by_key = f"{type(error).__name__}: {error}", {}
            logger.warning(
                "Draft passes are not recorded on this CPU, which makes them slower "
                "(%s). Please report it; enforce_eager in the speculative config "
                "avoids this message.",
                self.reason,
            )
            return run()

    def _verify(
        self, known: _Recorded, run: Run, given: Tensors, tensors: Tensors
    ) -> Any:
        if not known.graph.fits(tensors):
            raise NotRecordableError("it looks at a part of an input that moves")
        differs = not are_same(given, known.first)
        starts = get_forward_context().attn_metadata[self._layers[0]].query_start_loc
        output = known.graph.verify(run, tensors, num_rows=int(starts[-1]))
        if differs:
            known.is_verified, known.first = True, []
        return output

    def _is_recordable(self) -> bool:
        """Whether the layers' attention metadata is of the kind that is recorded."""
        by_layer = get_forward_context().attn_metadata
        if not by_layer:
            return False
        if not self._layers:
            # Layers of a group have the same metadata.
            first = {id(one): name for name, one in reversed(by_layer.items())}
            self._layers = list(first.values())
        found = [by_layer[name] for name in self._layers]
        return all(
            type(one) is CPUAttentionMetadata and one.draft_tree is None
            for one in found
        )

    def _read(self, given: Tensors, num_rows: int) -> tuple[Tensors, Key]:
        """The tensors that a pass reads, and what else it depends on."""
        context, tensors = get_forward_context(), [*given]
        key: list[Any] = [one is None or one.shape for one in tensors]
        for name in self._layers:
            metadata = context.attn_metadata[name]
            # Padding has no slot and no request. What covers it does not depend on how
            # many rows it has.
            metadata.num_actual_tokens = num_rows
            key += metadata.causal, metadata.dynamic_causal is None
            tensors += (
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.slot_mapping,
                metadata.scheduler_metadata,
                metadata.dynamic_causal,
                context.slot_mapping.get(name),
            )
        return tensors, tuple(key)
