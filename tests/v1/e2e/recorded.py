# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs without CUDA: what would be captured is kept as a call, and replayed.

The code that chooses a graph for a batch, pads it and refreshes its metadata is the
same as on a GPU. As there, a replay only reads the buffers. On a GPU real graphs are
used.
"""

from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.spec_decode.unified.graphs import (
    DraftBatchDescriptor,
    DraftGraphs,
    batches_to_record,
)
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator

from .runner import Engine
from .watches import Given, around

# Draft passes with prompts would need a compiled model, so they run eagerly, as on a
# CPU.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 64]


class Replays:
    """Counts replays of graphs: of first and later passes, and piecewise ones."""

    def __init__(self, engine: Engine) -> None:
        self.found = {"first": 0, "later": 0, "piecewise": 0}
        if graphs := getattr(engine.speculator, "graphs", None):
            around(graphs, "run_fullgraph", before=self._full)
            around(graphs, "run_pw_graph", before=self._piecewise)

    def _full(self, given: Given) -> None:
        self.found["later" if given["desc"].first_pass else "first"] += 1

    def _piecewise(self, given: Given) -> None:
        self.found["piecewise"] += 1


class RecordedCalls(DraftGraphs):
    """Stores calls instead of graphs."""

    def record_calls(self, speculator: UnifiedSpeculator) -> None:
        self.graphs = {
            desc: speculator.runner.captured(desc, speculator.plans)
            for descs in self._capture_descs.values()
            for desc in descs
            if desc.cg_mode == CUDAGraphMode.FULL
        }
        self._graphs_captured = True
        speculator.inputs.reset()

    def run_fullgraph(self, desc: DraftBatchDescriptor) -> None:
        self.graphs[desc](CUDAGraphMode.NONE)


def refresh(self: UnifiedSpeculator, attn_metadata: dict[str, Any], num_reqs: int):
    """Rebuilds metadata from the buffers, as a GPU backend does inside a graph."""
    batch = self.input_buffers
    lens = batch.query_start_loc[: num_reqs + 1].diff()
    real = int((lens > 0).sum())
    starts = batch.query_start_loc[: real + 1].numpy()
    end = int(starts[-1])
    shape = DraftBatchDescriptor(CUDAGraphMode.NONE, end, real)
    fresh = self._build_attn_metadata(
        real,
        shape,
        starts,
        batch.seq_lens[:real],
        step=0,
        slot_mappings=batch.slot_mappings[:, :end],
    )
    attn_metadata.clear()
    attn_metadata.update(fresh)


def record_calls(engine: Engine) -> None:
    """Captures decode batches, whose draft passes are replays from now on."""
    speculator: UnifiedSpeculator = engine.speculator
    config = speculator.target_config
    config.compilation_config.cudagraph_capture_sizes = CAPTURE_SIZES
    config.compilation_config.max_cudagraph_capture_size = CAPTURE_SIZES[-1]
    UnifiedSpeculator._update_draft_decode_metadata = refresh
    speculator.supports_decode_metadata_update = True
    batches = batches_to_record(
        config,
        CUDAGraphMode.FULL_DECODE_ONLY,
        speculator.plans,
        AttentionCGSupport.ALWAYS,
        piecewise=False,
        fused=True,
    )
    mode = CUDAGraphMode.NONE  # needs no memory pool
    graphs = RecordedCalls(speculator.vllm_config, speculator.device, mode, batches)
    graphs.record_calls(speculator)
    speculator.runner.graphs = graphs
