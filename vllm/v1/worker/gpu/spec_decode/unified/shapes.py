# SPDX-License-Identifier: Apache-2.0
"""Sizes of a step's draft batches, and the CUDA graphs that run them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import get_uniform_decode_token_count

from .graphs import DraftBatchDescriptor, DraftGraphs
from .plan import DraftPlan


class DraftShape(NamedTuple):
    """Size of a draft batch, as known on the host."""

    graph: DraftBatchDescriptor  # cg_mode NONE: sizes to run without a graph
    # [num_reqs + 1] int32, equal to the device's unless drafts were trimmed.
    query_start_loc: np.ndarray
    num_tokens_across_dp: torch.Tensor | None  # [dp_size] int32, rows on each rank

    @property
    def num_tokens(self) -> int:
        """Rows of the batch, padding included."""
        return self.graph.num_tokens

    @property
    def num_unpadded_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def is_full(self) -> bool:
        return self.graph.cg_mode == CUDAGraphMode.FULL


@dataclass(frozen=True)
class StepShapes:
    """The shapes of one step's passes.

    Attributes:
        graphs: the captured graphs; None before capture.
        dp_rank: this data-parallel rank.
        sync: what the data-parallel ranks agreed on for the target's batch.
        fits_graphs: whether the block tables are those that graphs were captured with.
        max_verified: the most rows of a decoding request, K + 1; trees are cut to it.
        has_embeddings: whether some rows of the first pass take multimodal embeddings
            of the target; FULL graphs take tokens only.
    """

    graphs: DraftGraphs | None
    dp_rank: int
    sync: DPSyncState | None
    fits_graphs: bool
    max_verified: int
    has_embeddings: bool = False

    def first(self, batch: InputBatch, plan: DraftPlan) -> DraftShape:
        n, extra = batch.num_reqs, plan.layout.num_extra_slots
        # A dummy batch has a max_query_len too, but no drafts.
        has_drafts = batch.num_draft_tokens_per_req is not None
        is_trimmed = has_drafts and batch.max_query_len is not None
        starts = trimmed_starts(batch) if is_trimmed else batch.query_start_loc_np
        starts = starts[: n + 1] + _arange(n + 1) * extra
        verified = get_uniform_decode_token_count(
            n,
            batch.num_tokens,
            int(batch.num_scheduled_tokens.max()),
            batch.decode_graph_eligible,
        )
        if self.sync is not None:
            verified = self.sync.uniform_token_count
        graph, may_replay = None, self.fits_graphs and not self.has_embeddings
        if verified is not None:
            verified = min(verified, self.max_verified)
            shape = verified + extra, plan.recorded_as, 0
            graph = self._find_full(n, shape, may_replay)
        elif is_trimmed and self.graphs is not None and may_replay:
            graph = self.graphs.find_ragged(n, int(starts[-1]), plan.recorded_as)
        if graph is None and self.sync is None and self.graphs is not None:
            graph = self.graphs.find_piecewise(int(starts[-1]))
        return self._shape(graph, starts, extra, is_first=True)

    def later(self, num_reqs: int, plan: DraftPlan) -> DraftShape:
        slots = plan.layout.num_follow_slots
        shape = slots, plan.later_recorded_as, 1
        graph = self._find_full(num_reqs, shape, self.fits_graphs)
        starts = _arange(num_reqs + 1) * slots
        return self._shape(graph, starts, slots, is_first=False)

    def _find_full(
        self, num_reqs: int, shape: tuple[int, int, int], may_replay: bool
    ) -> DraftBatchDescriptor | None:
        """The graph, or its shape to run eagerly if only this rank cannot replay it."""
        if self.graphs is None or (self.sync and self.sync.eager):
            return None
        most = num_reqs if self.sync is None else self.sync.num_reqs
        graph = self.graphs.find_full(most, *shape)
        if graph is None or may_replay:
            return graph
        # The other ranks replay it: this one pads its batch to the same shape.
        return replace(graph, cg_mode=CUDAGraphMode.NONE) if self.sync else None

    def _shape(
        self,
        graph: DraftBatchDescriptor | None,
        starts: np.ndarray,
        added_slots: int,
        is_first: bool,
    ) -> DraftShape:
        sync, across = self.sync, None
        if graph is not None:
            if sync is not None:
                across = torch.full_like(sync.num_tokens_across_dp, graph.num_tokens)
            return DraftShape(graph, starts, across)
        num_tokens = int(starts[-1])
        if sync is not None:
            # Every rank pads to the sizes of the target's batch that they agreed on.
            target = sync.num_tokens_across_dp
            across = (target if is_first else 0 * target) + sync.num_reqs * added_slots
            num_tokens = int(across[self.dp_rank])
        eager = DraftBatchDescriptor(CUDAGraphMode.NONE, num_tokens, len(starts) - 1)
        return DraftShape(eager, starts, across)


def trimmed_starts(batch: InputBatch) -> np.ndarray:
    """[num_reqs + 1] int32, a possible `query_start_loc` of a trimmed batch.

    Only the device knows which drafts are verified; here it is those of the first
    requests.
    """
    drafts = np.cumsum(batch.num_draft_tokens_per_req)
    others = np.cumsum(batch.num_scheduled_tokens) - drafts
    ends = others + np.minimum(drafts, batch.num_draft_tokens)
    return np.concatenate([[0], ends]).astype(np.int32)


def _arange(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32)
