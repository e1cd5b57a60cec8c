# SPDX-License-Identifier: Apache-2.0
"""The recorded passes of a draft model on a CPU: see `cpu_graph.py`.

A GPU's graphs are captured at start, for some numbers of rows that batches are padded
to. On a CPU a row costs time, and recording takes as long as a few passes; so each
number of rows is recorded when it is met, and verified when it is met again.
"""

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
Key = tuple[Any, ...]
Tensors = list[torch.Tensor | None]
Run = Callable[[], Any]


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
    """Runs a draft model, from the third pass of a kind on by a recording of it.

    Attributes:
        by_key: the passes that were met.
        reason: why nothing is recorded any more.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, _Recorded] = {}
        self.memory = Memory()
        self.reason: str | None = None
        self._layers: list[str] = []

    def run(self, model: nn.Module, inputs: dict[str, torch.Tensor | None]) -> Any:
        """`model(**inputs)`, in vLLM's forward context. The next pass of as many rows
        overwrites what it returns."""
        run = partial(model, **inputs)
        if self.reason is not None or (found := self._read(inputs)) is None:
            return run()
        tensors, key = found
        known = self.by_key.get(key)
        if known is not None and known.is_verified:
            graph = known.graph
            return graph.replay(tensors) if graph.fits(tensors) else run()
        given = [*inputs.values()]
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
        output = known.graph.verify(run, tensors)
        if differs:
            known.is_verified, known.first = True, []
        return output

    def _read(
        self, inputs: dict[str, torch.Tensor | None]
    ) -> tuple[Tensors, Key] | None:
        """The tensors that a pass reads, and what else it depends on; None if it is not
        worth recording, or its attention is of another kind."""
        context = get_forward_context()
        by_layer, slots = context.attn_metadata, context.slot_mapping
        if not by_layer:
            return None
        if not self._layers:
            # Layers of a group have the same metadata.
            first = {id(one): name for name, one in reversed(by_layer.items())}
            self._layers = list(first.values())
        tensors = list(inputs.values())
        key: list[Any] = [one is None or one.shape for one in tensors]
        for name in self._layers:
            metadata = by_layer[name]
            if (
                type(metadata) is not CPUAttentionMetadata
                or metadata.num_actual_tokens > MOST_ROWS
                or metadata.draft_tree is not None
            ):
                return None
            key += metadata.num_actual_tokens, metadata.causal
            tensors += (
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.slot_mapping,
                metadata.scheduler_metadata,
                metadata.dynamic_causal,
                slots.get(name),
            )
        return tensors, tuple(key)
