# SPDX-License-Identifier: Apache-2.0
"""Prepare, one pass or several, sample: the same for every kind of drafter."""

import time
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.utils import get_uniform_decode_token_count

from .graphs import DraftBatchDescriptor, DraftGraphs, batches_to_record
from .inputs import HiddenRows, VerifiedBatch, prepare_inputs
from .passes import DraftPasses, Drafts

logger = init_logger(__name__)


class _Shape(NamedTuple):
    """How large a draft batch is, as far as the host knows."""

    batch: DraftBatchDescriptor
    query_start_loc: np.ndarray  # [num_reqs + 1] int32, equal to the device's
    across_dp: torch.Tensor | None  # [dp_size] int32, rows on each rank


class UnifiedSpeculator(DraftPasses):
    """Drafts with any model that `layout.py` has a row for."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        # What a dummy run hands over: requests that own nothing.
        self.no_requests = torch.full_like(self.idx_mapping, -1)
        logger.info(
            "Unified speculator: passes per step %d, slots per pass at most %d, draft "
            "sampling %s.",
            self.layout.num_passes,
            self.input_buffers.max_num_tokens,
            self.speculative_config.draft_sample_method,
        )

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        """Drafts for every request of a verified batch; see BaseSpeculator.

        Returns:
            [num_reqs, K] int64 draft tokens, of which `num_speculative_tokens` count.
        """
        n = input_batch.num_reqs
        k = self.num_speculative_steps
        if num_speculative_tokens is not None:
            k = num_speculative_tokens
        drafts = self.lengths[k]
        hidden = self.target_hidden(last_hidden_states, aux_hidden_states)
        if dummy_run and skip_attn_for_dummy_run:
            self._profile(input_batch, hidden)
            return self.draft_tokens[:n]
        verified = VerifiedBatch(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.query_start_loc[: n + 1],
            self.no_requests[:n] if dummy_run else input_batch.idx_mapping,
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens[0],
            temperature,
            seeds,
        )
        longest = int(input_batch.seq_lens_cpu_upper_bound[:n].max())
        may_replay = self.block_tables.fit(n, longest)
        shape = self._first_shape(input_batch, drafts, may_replay, dp_sync_state)
        self._run_first_pass(verified, hidden, input_batch, drafts, shape)
        if drafts.layout.num_passes > 1:
            shape = self._later_shape(n, drafts, may_replay, dp_sync_state)
            self._run_later_passes(input_batch, drafts, shape)
        return self.draft_tokens[:n]

    # The shape of a draft batch, and the graph that serves it.

    def _first_shape(
        self,
        batch: InputBatch,
        drafts: Drafts,
        may_replay: bool,
        sync: DPSyncState | None,
    ) -> _Shape:
        n, extra = batch.num_reqs, drafts.layout.num_extra_slots
        starts = batch.query_start_loc_np[: n + 1] + self.arange_np[: n + 1] * extra
        verified = get_uniform_decode_token_count(
            n,
            batch.num_tokens,
            int(batch.num_scheduled_tokens.max()),
            batch.decode_graph_eligible,
        )
        if sync is not None:
            verified = sync.uniform_token_count
        graph = None
        if verified is not None:
            twin = self.first_pass_twins[drafts.num_drafts]
            graph = self._find_full(n, verified + extra, twin, 0, may_replay, sync)
        if graph is None and sync is None and self.graphs is not None:
            graph = self.graphs.find_piecewise(int(starts[-1]))
        return self._shape(graph, starts, sync, extra, is_first=True)

    def _later_shape(
        self,
        n: int,
        drafts: Drafts,
        may_replay: bool,
        sync: DPSyncState | None,
    ) -> _Shape:
        slots = drafts.layout.num_follow_slots
        graph = self._find_full(n, slots, drafts.num_drafts, 1, may_replay, sync)
        starts = self.arange_np[: n + 1] * slots
        return self._shape(graph, starts, sync, slots, is_first=False)

    def _find_full(
        self,
        n: int,
        slots: int,
        num_drafts: int,
        first_pass: int,
        may_replay: bool,
        sync: DPSyncState | None,
    ) -> DraftBatchDescriptor | None:
        """The graph, or what to run where this rank's block tables do not fit it."""
        if self.graphs is None or (sync and sync.eager):
            return None
        most = n if sync is None else sync.num_reqs
        graph = self.graphs.find_full(most, slots, num_drafts, first_pass)
        if graph is None or may_replay:
            return graph
        # The other ranks replay it: this one pads its batch to the same shape.
        return replace(graph, cg_mode=CUDAGraphMode.NONE) if sync else None

    def _shape(
        self,
        graph: DraftBatchDescriptor | None,
        starts: np.ndarray,
        sync: DPSyncState | None,
        added_slots: int,
        is_first: bool,
    ) -> _Shape:
        across = None
        if graph is not None:
            if sync is not None:
                across = torch.full_like(sync.num_tokens_across_dp, graph.num_tokens)
            return _Shape(graph, starts, across)
        num_tokens = int(starts[-1])
        if sync is not None:
            # Every rank pads to what the ranks told each other of the target's batch.
            target = sync.num_tokens_across_dp
            across = (target if is_first else 0 * target) + sync.num_reqs * added_slots
            num_tokens = int(across[self.dp_rank])
        eager = DraftBatchDescriptor(CUDAGraphMode.NONE, num_tokens, len(starts) - 1)
        return _Shape(eager, starts, across)

    # Running the passes.

    def _run_first_pass(
        self,
        verified: VerifiedBatch,
        hidden: HiddenRows | None,
        batch: InputBatch,
        drafts: Drafts,
        shape: _Shape,
    ) -> None:
        prepare_inputs(
            verified,
            drafts.layout,
            self.input_buffers,
            self.block_tables,
            # Without drafts the next token is laid out all the same.
            num_samples=max(drafts.num_samples(0), 1),
            num_padded_tokens=shape.batch.num_tokens,
            limit=self.limit,
            max_query_len=int(batch.num_scheduled_tokens.max()),
            mask_token_id=self.mask_token_id,
            hidden=hidden,
        )
        if self._is_self_contained(shape):
            self._replay(shape)
        else:
            self._run_with_metadata(shape, batch, drafts, 0)

    def _run_later_passes(
        self, batch: InputBatch, drafts: Drafts, shape: _Shape
    ) -> None:
        if self._is_self_contained(shape):
            self._replay(shape)
            return
        n, num_tokens = batch.num_reqs, shape.batch.num_tokens
        for draft_pass in range(1, drafts.layout.num_passes):
            self._prepare_later(drafts, draft_pass, n, num_tokens)
            self._run_with_metadata(shape, batch, drafts, draft_pass)

    def _is_self_contained(self, shape: _Shape) -> bool:
        """Whether a graph needs nothing of the host but to be replayed."""
        is_full = shape.batch.cg_mode == CUDAGraphMode.FULL
        return is_full and self.supports_decode_metadata_update

    def _replay(self, shape: _Shape) -> None:
        self._prepare_eplb_forward(int(shape.query_start_loc[-1]))
        for groups in self.attn_groups:
            for group in groups:
                tables = self.block_tables.input_block_tables
                group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
        self.graphs.run_fullgraph(shape.batch)

    def _run_with_metadata(
        self, shape: _Shape, batch: InputBatch, drafts: Drafts, draft_pass: int
    ) -> None:
        """One pass, with attention metadata built by the host."""
        desc, layout = shape.batch, drafts.layout
        is_full = desc.cg_mode == CUDAGraphMode.FULL
        slots = self.input_buffers.slot_mappings[:, : desc.num_tokens]
        num_tokens = int(shape.query_start_loc[-1])
        self._prepare_eplb_forward(num_tokens)
        metadata = self._build_attn_metadata(
            batch.num_reqs,
            desc,
            shape.query_start_loc,
            batch.seq_lens_cpu_upper_bound,
            step=layout.num_extra_slots + draft_pass * layout.parallel_width,
            slot_mappings=slots if is_full else slots[:, :num_tokens],
        )
        if is_full:
            span = {"first_pass": draft_pass, "end_pass": draft_pass + 1}
            self.graphs.run_fullgraph(replace(desc, **span))
            return
        self._run_pass(
            drafts,
            draft_pass,
            batch.num_reqs,
            desc.num_tokens,
            metadata,
            build_slot_mappings_by_layer(slots, self.kv_cache_config),
            shape.across_dp,
            desc.cg_mode,
        )

    def _profile(self, batch: InputBatch, hidden: HiddenRows | None) -> None:
        """Runs the widest batch there can be, before there is a KV cache."""
        self.input_buffers.reset()
        if hidden is not None:
            self.input_buffers.fed_rows(hidden.stand_ins)
        drafts = self.lengths[self.num_speculative_steps]
        num_tokens = self.layout.max_num_tokens(batch.num_tokens, batch.num_reqs)
        self._prepare_eplb_forward(num_tokens)
        self._run_pass(drafts, 0, batch.num_reqs, num_tokens, None, None, None)

    # Recording graphs.

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        batches = batches_to_record(
            self.target_config,
            cudagraph_mode,
            {k: drafts.layout for k, drafts in self.lengths.items()},
            self.attn_cg_support.min_cg_support,
            piecewise=is_breakable_cudagraph_enabled()
            or has_compiled_submodule(self.model),
            fused=self.supports_decode_metadata_update,
        )
        mode = cudagraph_mode if batches else CUDAGraphMode.NONE
        self.graphs = DraftGraphs(self.vllm_config, self.device, mode, batches)

    def capture(self) -> None:
        if not self.graphs.needs_capture():
            return
        start, free = time.perf_counter(), torch.accelerator.get_memory_info()[0]
        if self.graphs.use_breakable_cg:
            self.graphs.init_breakable_cg_runner(self.model)
        self.graphs.capture(self._recorder, "Capturing draft CUDA graphs")
        self.input_buffers.reset()
        taken = free - torch.accelerator.get_memory_info()[0]
        logger.info(
            "Captured %d draft CUDA graphs in %.1f s, %.2f GiB.",
            len(self.graphs.graphs),
            time.perf_counter() - start,
            taken / 2**30,
        )

    def _recorder(self, desc: DraftBatchDescriptor, warmup: bool):
        """Lays a dummy batch out; returns what runs over it, to be recorded."""
        across = None
        if self.dp_size > 1:
            across = torch.full((self.dp_size,), desc.num_tokens, dtype=torch.int32)
        if desc.cg_mode == CUDAGraphMode.PIECEWISE:
            self.input_buffers.reset()
            return partial(self._forward, desc.num_tokens, True, None, None, across)
        self.block_tables.fit(desc.num_reqs, longest=0)
        self.input_buffers.lay_out_uniform(desc.num_reqs, desc.uniform_token_count)
        slots = self.input_buffers.slot_mappings[:, : desc.num_tokens]
        metadata = self._metadata_to_record(desc, slots)
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        return lambda _: self._run_recorded(desc, metadata, by_layer, across)

    def _metadata_to_record(
        self, desc: DraftBatchDescriptor, slots: torch.Tensor
    ) -> dict[str, Any]:
        n, buffers = desc.num_reqs, self.input_buffers
        starts = torch.from_numpy(self.arange_np[: n + 1] * desc.uniform_token_count)
        return build_attn_metadata(
            attn_groups=self.attn_groups,
            num_reqs=n,
            num_tokens=desc.num_tokens,
            query_start_loc_gpu=buffers.query_start_loc[: n + 1],
            query_start_loc_cpu=starts,
            max_query_len=desc.uniform_token_count,
            seq_lens=buffers.seq_lens[:n],
            max_seq_len=self.draft_max_seq_len,
            block_tables=[rows[:n] for rows in self.block_tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=self.kv_cache_config,
            positions=buffers.positions[: desc.num_tokens],
            is_prefilling=self.draft_is_prefilling[:n],
            for_cudagraph_capture=True,
        )

    def _run_recorded(
        self,
        desc: DraftBatchDescriptor,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        across_dp: torch.Tensor | None,
    ) -> None:
        drafts, n = self.lengths[desc.num_drafts], desc.num_reqs
        for draft_pass in range(desc.first_pass, desc.end_pass):
            if self.supports_decode_metadata_update:
                if draft_pass > 0:
                    self._prepare_later(drafts, draft_pass, n, desc.num_tokens)
                self._update_draft_decode_metadata(attn_metadata, n)
            self._run_pass(
                drafts,
                draft_pass,
                n,
                desc.num_tokens,
                attn_metadata,
                slot_mappings,
                across_dp,
            )
