# SPDX-License-Identifier: Apache-2.0
"""Sizes of draft batches, and their CUDA graphs: which are captured, and which one a
batch replays."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import (
    is_worth_trees,
    least_trimmed,
    lengths_vary,
    trims,
)
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.spec_decode.graph_sizes import ROWS_APART, shares_graphs, worth_recording
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import get_uniform_decode_token_count

from .layout import DraftPlan

logger = init_logger(__name__)

# Fewer rows would not make a draft pass shorter.
FREE_ROWS = 128


@dataclass(frozen=True)
class DraftBatchDescriptor(BatchExecutionDescriptor):
    """Shape of a draft batch, and the passes that one graph of it runs.

    A FULL graph has `num_reqs` requests of `uniform_token_count` slots each; or, if
    that is None, of at most `max_query_len` slots each and `num_tokens` in total. A
    PIECEWISE one has `num_tokens` slots, however requests share them.
    """

    num_drafts: int = 0  # drafts per request that the step asks for
    first_pass: int = 0
    end_pass: int = 1


def batches_to_record(
    vllm_config: VllmConfig,
    cudagraph_mode: CUDAGraphMode,
    plans: dict[int, DraftPlan],
    support: AttentionCGSupport,
    *,
    piecewise: bool,
    fused: bool,
) -> list[DraftBatchDescriptor]:
    """Every batch to capture.

    Args:
        vllm_config: the engine's.
        cudagraph_mode: what the target runs with.
        plans: by the number of drafts that a step may ask for.
        support: what graphs the drafter's attention backends support.
        piecewise: whether the draft model can run piecewise graphs.
        fused: whether attention metadata can be refreshed inside a graph.
    """
    if vllm_config.speculative_config.enforce_eager:
        return []
    batches: list[DraftBatchDescriptor] = []
    if cudagraph_mode.mixed_mode() == CUDAGraphMode.PIECEWISE:
        if piecewise:
            batches += mixed_batches(vllm_config)
        else:
            logger.info("Batches with prompts draft eagerly: no compiled draft model.")
    if cudagraph_mode.decode_mode() == CUDAGraphMode.FULL:
        shared = shares_graphs(vllm_config, support)
        batches += first_batches(vllm_config, plans, shared)
        batches += later_batches(vllm_config, plans, fused)
    usable = [batch for batch in batches if _is_supported(batch, support)]
    if len(usable) < len(batches):
        logger.warning(
            "Decode batches draft without CUDA graphs: the drafter's attention "
            "supports %s only. Choose another with attention_backend in the "
            "speculative config.",
            support.name,
        )
    return usable


def _is_supported(batch: DraftBatchDescriptor, support: AttentionCGSupport) -> bool:
    if batch.cg_mode == CUDAGraphMode.PIECEWISE:
        return True
    needed = AttentionCGSupport.UNIFORM_BATCH
    if batch.uniform_token_count is None:
        needed = AttentionCGSupport.ALWAYS
    if batch.uniform_token_count == 1:
        needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return support.value >= needed.value


def first_batches(
    vllm_config: VllmConfig, plans: dict[int, DraftPlan], shared: bool
) -> Iterator[DraftBatchDescriptor]:
    """The first passes of decode batches.

    With one token per pass they are ragged if `shared`, for any number of drafts
    before: rows cost such a pass little. A step without drafts has few, so it has
    graphs for each number of rows of a request, as all others have. The next step
    usually asks for as many drafts as are verified; if several numbers of drafts share
    the first pass, changes from one to another are covered too.

    Steps whose drafts were trimmed, if any are, may draft any number next except 0 or
    a tree: changes from chains to trees are rare. If fewer drafts can be chosen, they
    have at most three times the target's rows: most of more would not be verified, and
    the largest batch decides how much memory graphs take.
    """
    spec = vllm_config.speculative_config
    most = 3 * (vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    shared = shared and plans[max(plans)].layout.parallel_width == 1
    longest = max(plan.layout.num_speculative_tokens for plan in plans.values())
    for plan, before in _recorded(plans, attrgetter("recorded_as")):
        num_drafts, layout = plan.num_drafts, plan.layout
        is_ragged = shared and num_drafts > 0
        nodes = min(before) if plan.is_tree else None
        if is_ragged or (trims(spec) and 0 < num_drafts <= longest):
            least = 1 if is_ragged else least_trimmed(spec)
            extra = layout.num_extra_slots
            for n, rows in _ragged_sizes(vllm_config, least, longest + 1, nodes):
                num_tokens = rows + n * extra
                if len(plans) > 1 and num_tokens > most:
                    continue
                yield DraftBatchDescriptor(
                    CUDAGraphMode.FULL,
                    num_tokens=num_tokens,
                    num_reqs=n,
                    max_query_len=longest + 1 + extra,
                    num_drafts=num_drafts,
                )
        if layout.parallel_width == 1 and num_drafts and 0 in plans:
            before = [0, *before]
        for verified in {min(k, longest) + 1 for k in before if not is_ragged}:
            slots = verified + layout.num_extra_slots
            for num_reqs in _request_counts(vllm_config, verified, nodes):
                yield _full(num_reqs, slots, num_drafts, 0, 1)


def _ragged_sizes(
    vllm_config: VllmConfig, least: int, verified: int, nodes: int | None
) -> Iterator[tuple[int, int]]:
    """Requests, powers of two, and verified rows of ragged batches.

    Args:
        least: requests of the smallest batch.
        verified: the most rows of a request.
        nodes: of the smallest tree that is drafted; None: chains are.
    """
    largest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    levels = worth_recording(range(ROWS_APART, largest + 1, ROWS_APART), share=4)
    most = vllm_config.scheduler_config.max_num_seqs
    counts = {least << bits for bits in range(most.bit_length())} | {most}
    counts = sorted(n for n in counts if least <= n <= min(most, largest - 1))
    for n in _worth(vllm_config, counts, nodes):
        top = min(n * verified, largest)
        fewer = (m for m in levels if max(n, FREE_ROWS) <= m < top)
        yield from ((n, m) for m in [*fewer, top])


def later_batches(
    vllm_config: VllmConfig, plans: dict[int, DraftPlan], fused: bool
) -> Iterator[DraftBatchDescriptor]:
    """Passes 2 and on: one graph for all of them if `fused`, else one each.

    If several numbers of drafts share their passes, a graph ends after the last pass of
    each, and a step replays graphs up to its own last pass.
    """
    for plan, members in _recorded(plans, attrgetter("later_recorded_as")):
        stops = {plans[k].layout.num_passes for k in members}
        starts = sorted(stops | {1}) if fused else range(1, max(stops) + 1)
        nodes = min(members) if plan.is_tree else None
        slots = plan.layout.num_follow_slots
        for num_reqs in _request_counts(vllm_config, 1, nodes):
            for first, end in pairwise(starts):
                yield _full(num_reqs, slots, plan.num_drafts, first, end)


def _recorded(
    plans: dict[int, DraftPlan], recorded_as: Callable[[DraftPlan], int]
) -> Iterator[tuple[DraftPlan, list[int]]]:
    """Each plan whose passes are recorded, and the numbers of drafts that have them."""
    members = defaultdict(list)
    for num_drafts, plan in plans.items():
        members[recorded_as(plan)].append(num_drafts)
    return ((plans[k], members[k]) for k in members)


def mixed_batches(vllm_config: VllmConfig) -> Iterator[DraftBatchDescriptor]:
    """First passes with prompts, in the target's piecewise capture sizes."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    if lengths_vary(vllm_config.speculative_config):
        sizes = worth_recording(sizes)
    for num_tokens in sizes:
        yield DraftBatchDescriptor(CUDAGraphMode.PIECEWISE, num_tokens, None)


def _full(
    num_reqs: int, slots: int, num_drafts: int, first: int, end: int
) -> DraftBatchDescriptor:
    return DraftBatchDescriptor(
        CUDAGraphMode.FULL,
        num_tokens=num_reqs * slots,
        num_reqs=num_reqs,
        uniform_token_count=slots,
        num_drafts=num_drafts,
        first_pass=first,
        end_pass=end,
    )


def _request_counts(
    vllm_config: VllmConfig, query_len: int, nodes: int | None
) -> list[int]:
    """Numbers of requests to capture: those of the capture sizes, and the largest.

    Args:
        query_len: tokens per request.
        nodes: of the smallest tree that is drafted; None: chains are.
    """
    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or ()
    largest = compilation.max_cudagraph_capture_size or 0
    most = vllm_config.scheduler_config.max_num_seqs
    counts = {-(-size // query_len) for size in sizes}
    counts.add(min(most, largest // query_len))
    counts = {n for n in counts if 0 < n <= most and n * query_len <= largest}
    if lengths_vary(vllm_config.speculative_config):
        counts = worth_recording(counts, query_len)
    return _worth(vllm_config, sorted(counts), nodes)


def _worth(vllm_config: VllmConfig, counts: list[int], nodes: int | None) -> list[int]:
    """Those of some numbers of requests to which batches are padded that may verify
    trees of `nodes` nodes; all of them if None."""
    spec = vllm_config.speculative_config
    return [
        n
        for below, n in pairwise([0, *counts])
        if nodes is None or is_worth_trees(spec, below + 1, nodes)
    ]


class DraftGraphs(CudaGraphManager):
    """The captured draft batches."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        batches: list[DraftBatchDescriptor],
    ):
        self._batches = batches
        super().__init__(vllm_config, device, cudagraph_mode, decode_query_len=1)

    def record(
        self, model: nn.Module, make: Callable[..., Callable[[CUDAGraphMode], Any]]
    ) -> None:
        """Captures every batch.

        Args:
            model: the draft model.
            make: writes a dummy batch for a descriptor, and returns the function to
                capture on it.
        """
        if not self.needs_capture():
            return
        start, free = time.perf_counter(), torch.accelerator.get_memory_info()[0]
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(model)
        self.capture(make, "Capturing draft CUDA graphs")
        used = free - torch.accelerator.get_memory_info()[0]
        logger.info(
            "Captured %d draft CUDA graphs in %.1f s, %.2f GiB.",
            len(self.graphs),
            time.perf_counter() - start,
            used / 2**30,
        )

    def run_until(self, desc: DraftBatchDescriptor, end_pass: int) -> None:
        """Replays a graph, and those that continue it up to `end_pass`."""
        self.run_fullgraph(desc)
        while desc.end_pass < end_pass:
            shape = desc.uniform_token_count, desc.num_drafts, desc.end_pass
            desc = self.find_full(desc.num_reqs, *shape)
            self.run_fullgraph(desc)

    def run_pass(self, desc: DraftBatchDescriptor, draft_pass: int) -> None:
        """Replays one pass, where each graph holds a single one."""
        one = {"first_pass": draft_pass, "end_pass": draft_pass + 1}
        self.run_fullgraph(replace(desc, **one))

    def _init_candidates(self) -> None:
        by_mode: defaultdict[CUDAGraphMode, list[DraftBatchDescriptor]]
        by_mode, by_shape = defaultdict(list), defaultdict(list)
        # Largest first, so that the smaller ones reuse their memory.
        for desc in sorted(self._batches, key=lambda d: d.num_tokens, reverse=True):
            by_mode[desc.cg_mode].append(desc)
        for desc in sorted(
            self._batches, key=lambda d: (d.num_reqs or 0, d.num_tokens)
        ):
            slots = desc.uniform_token_count
            shape = desc.cg_mode, slots, desc.num_drafts, desc.first_pass
            by_shape[shape].append(desc)
        self._capture_descs, self._by_shape = by_mode, by_shape

    def find_full(
        self, num_reqs: int, slots: int, num_drafts: int, first_pass: int
    ) -> DraftBatchDescriptor | None:
        """The smallest captured batch of `slots` slots per request; None if none."""
        return self._find((CUDAGraphMode.FULL, slots, num_drafts, first_pass), num_reqs)

    def find_ragged(
        self, num_reqs: int, num_tokens: int, num_drafts: int
    ) -> DraftBatchDescriptor | None:
        """A captured first pass of a batch of unequal query lengths; None if none.

        Prefers the fewest requests: padded ones are sampled too.
        """
        shape = (CUDAGraphMode.FULL, None, num_drafts, 0)
        return self._find(shape, num_reqs, num_tokens)

    def find_piecewise(self, num_tokens: int) -> DraftBatchDescriptor | None:
        """The smallest captured size that holds a mixed batch; None if none."""
        return self._find((CUDAGraphMode.PIECEWISE, None, 0, 0), 0, num_tokens)

    def _find(
        self, shape: tuple, num_reqs: int, num_tokens: int = 0
    ) -> DraftBatchDescriptor | None:
        found = self._by_shape.get(shape, ()) if self._graphs_captured else ()
        for desc in found:
            if (desc.num_reqs or 0) >= num_reqs and desc.num_tokens >= num_tokens:
                return desc
        return None


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
        starts = starts[: n + 1] + np.arange(n + 1, dtype=np.int32) * extra
        longest = int(batch.num_scheduled_tokens.max())
        is_decode = batch.decode_graph_eligible
        verified = get_uniform_decode_token_count(
            n, batch.num_tokens, longest, is_decode
        )
        if self.sync is not None:
            verified = self.sync.uniform_token_count
        graph, may_replay = None, self.fits_graphs and not self.has_embeddings
        if verified is not None:
            shape = min(verified, self.max_verified) + extra, plan.recorded_as, 0
            graph = self._find_full(n, shape, may_replay)
        is_alone = self.sync is None and self.graphs is not None
        may_replay &= is_alone and is_decode and longest <= self.max_verified
        if graph is None and may_replay:
            graph = self.graphs.find_ragged(n, int(starts[-1]), plan.recorded_as)
        if graph is None and is_alone:
            graph = self.graphs.find_piecewise(int(starts[-1]))
        return self._shape(graph, starts, extra, is_first=True)

    def later(self, num_reqs: int, plan: DraftPlan) -> DraftShape:
        slots = plan.layout.num_follow_slots
        shape = slots, plan.later_recorded_as, 1
        graph = self._find_full(num_reqs, shape, self.fits_graphs)
        starts = np.arange(num_reqs + 1, dtype=np.int32) * slots
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
