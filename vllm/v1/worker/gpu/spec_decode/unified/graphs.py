# SPDX-License-Identifier: Apache-2.0
"""Which draft batches are recorded as CUDA graphs, and which one serves a batch."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from .layout import DraftLayout

logger = init_logger(__name__)


@dataclass(frozen=True)
class DraftBatchDescriptor(BatchExecutionDescriptor):
    """Shape of a draft batch, and the passes that one graph of it runs.

    A FULL graph has `num_reqs` requests of `uniform_token_count` slots each. A
    PIECEWISE one has `num_tokens` slots, however they are shared out.
    """

    num_drafts: int = 0  # drafts a request asks for in the step
    first_pass: int = 0
    end_pass: int = 1


def batches_to_record(
    vllm_config: VllmConfig,
    cudagraph_mode: CUDAGraphMode,
    layouts: dict[int, DraftLayout],
    support: AttentionCGSupport,
    *,
    piecewise: bool,
    fused: bool,
) -> list[DraftBatchDescriptor]:
    """Every batch to record.

    Args:
        vllm_config: the engine's.
        cudagraph_mode: what the target runs with.
        layouts: the layout of each number of drafts that a step may ask for.
        support: what the drafter's attention can record.
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
        batches += uniform_batches(vllm_config, layouts)
        for num_drafts, layout in layouts.items():
            batches += later_batches(vllm_config, layout, num_drafts, fused)
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
    if batch.uniform_token_count == 1:
        needed = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return support.value >= needed.value


def first_pass_twins(layouts: dict[int, DraftLayout]) -> dict[int, int]:
    """For each number of drafts, the largest one whose first pass is the same.

    Without drafts nothing is sampled, so that pass is like no other.
    """

    def largest(num_drafts: int) -> int:
        width = layouts[num_drafts].parallel_width
        return max(k for k, layout in layouts.items() if layout.parallel_width == width)

    return {k: largest(k) if k else 0 for k in layouts}


def uniform_batches(
    vllm_config: VllmConfig, layouts: dict[int, DraftLayout]
) -> Iterator[DraftBatchDescriptor]:
    """The first passes of decode batches: those the target has FULL graphs for.

    A request that was given k drafts verifies k + 1 tokens, and the next step most
    often asks for as many again. Where first passes are the same, whatever the number
    of drafts, a step that asks for another number is covered too.
    """
    twins = first_pass_twins(layouts)
    for num_drafts in sorted(set(twins.values())):
        layout = layouts[num_drafts]
        before = {k for k, twin in twins.items() if twin == num_drafts}
        if layout.parallel_width == 1 and num_drafts and 0 in layouts:
            before.add(0)
        for verified in sorted(k + 1 for k in before):
            slots = verified + layout.num_extra_slots
            for num_reqs in _request_counts(vllm_config, verified):
                yield _full(num_reqs, slots, num_drafts, 0, 1)


def later_batches(
    vllm_config: VllmConfig, layout: DraftLayout, num_drafts: int, fused: bool
) -> Iterator[DraftBatchDescriptor]:
    """Passes 2 and on: one graph for all of them if `fused`, else one each."""
    passes = range(1, layout.num_passes)
    if not passes:
        return
    spans = [(1, passes.stop)] if fused else [(p, p + 1) for p in passes]
    for num_reqs in _request_counts(vllm_config, 1):
        for first, end in spans:
            yield _full(num_reqs, layout.num_follow_slots, num_drafts, first, end)


def mixed_batches(vllm_config: VllmConfig) -> Iterator[DraftBatchDescriptor]:
    """First passes with prompts in them: the target's own piecewise sizes."""
    for num_tokens in vllm_config.compilation_config.cudagraph_capture_sizes or ():
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


def _request_counts(vllm_config: VllmConfig, query_len: int) -> list[int]:
    """Numbers of requests that the engine's capture sizes cover, and the most.

    Args:
        query_len: tokens per request.
    """
    compilation = vllm_config.compilation_config
    sizes = compilation.cudagraph_capture_sizes or ()
    largest = compilation.max_cudagraph_capture_size or 0
    most = vllm_config.scheduler_config.max_num_seqs
    counts = {-(-size // query_len) for size in sizes} | {most}
    return sorted(n for n in counts if n <= most and n * query_len <= largest)


class DraftGraphs(CudaGraphManager):
    """The recorded draft batches."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        batches: list[DraftBatchDescriptor],
    ):
        self._batches = batches
        super().__init__(vllm_config, device, cudagraph_mode, decode_query_len=1)

    def _init_candidates(self) -> None:
        by_mode: defaultdict[CUDAGraphMode, list[DraftBatchDescriptor]]
        by_mode, by_shape = defaultdict(list), defaultdict(list)
        # Largest first, so that the smaller ones fit into the memory they took.
        for desc in sorted(self._batches, key=lambda d: d.num_tokens, reverse=True):
            by_mode[desc.cg_mode].append(desc)
            by_shape[_shape(desc)].insert(0, desc)
        self._capture_descs, self._by_shape = by_mode, by_shape

    def find_full(
        self, num_reqs: int, slots: int, num_drafts: int, first_pass: int
    ) -> DraftBatchDescriptor | None:
        """The smallest recorded batch of `slots` slots a request; None if none."""
        shape = (CUDAGraphMode.FULL, slots, num_drafts, first_pass)
        return self._find(shape, num_reqs, lambda desc: desc.num_reqs)

    def find_piecewise(self, num_tokens: int) -> DraftBatchDescriptor | None:
        """The smallest recorded size that holds a mixed batch; None if none."""
        shape = (CUDAGraphMode.PIECEWISE, None, 0, 0)
        return self._find(shape, num_tokens, lambda desc: desc.num_tokens)

    def _find(self, shape, size, size_of) -> DraftBatchDescriptor | None:
        found = self._by_shape.get(shape, ()) if self._graphs_captured else ()
        at = bisect_left(found, size, key=size_of)
        return found[at] if at < len(found) else None


def _shape(desc: DraftBatchDescriptor) -> tuple:
    slots = desc.uniform_token_count
    return desc.cg_mode, slots, desc.num_drafts, desc.first_pass
