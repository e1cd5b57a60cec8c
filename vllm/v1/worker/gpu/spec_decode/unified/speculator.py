# SPDX-License-Identifier: Apache-2.0
"""Prepare, one pass or several, sample: the same for every kind of drafter."""

from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafting import draft_limit, get_mask_token_id
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .block_tables import DraftBlockTables, with_room
from .buffers import DraftBuffers
from .draft_config import attention_config, draft_layout, widened_config
from .inputs import HiddenRows, PreviousPass, VerifiedBatch, prepare_inputs

logger = init_logger(__name__)


class _Shape(NamedTuple):
    """How large a pass is, as far as the host knows."""

    query_start_loc: np.ndarray  # [num_reqs + 1] int32, equal to the device's
    num_tokens: int  # rows of the draft batch, padding for other ranks included
    across_dp: torch.Tensor | None  # [dp_size] int32, rows on each rank
    step: int  # by how much sequences may be longer than the target's


class UnifiedSpeculator(DraftModelSpeculator):
    """Drafts with any model that `layout.py` has a row for."""

    # The drafter's width is its own affair: the target runs at its whole budget.
    num_query_per_req = 1
    num_extra_query_per_req = 0
    # Width of the hidden states a drafter is fed; None if it takes none.
    fed_hidden_size: int | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.layout = draft_layout(vllm_config)
        super().__init__(widened_config(vllm_config, self.layout), device)
        self.mask_token_id = 0
        if self.layout.num_masks:
            self.mask_token_id = get_mask_token_id(self.draft_model_config.hf_config)
        self.input_buffers: DraftBuffers = DraftBuffers(
            self.layout,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self.max_num_reqs,
            device,
            self.fed_hidden_size,
            self.dtype,
        )
        width = self.layout.parallel_width
        logger.info(
            "Unified speculator: method %s, %d tokens a step, %d a pass.",
            self.method,
            self.num_speculative_steps,
            width,
        )
        # Column of `draft_logits` for each sampled slot, per pass.
        columns = torch.arange(self.layout.num_passes * width, dtype=torch.int32)
        self.sample_columns = (
            columns.view(-1, 1, width).repeat(1, self.max_num_reqs, 1).to(device)
        )

    def set_attn(self, model_state, kv_cache_config, block_tables, *args) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.input_buffers.allocate_slot_mappings(block_tables.num_kv_cache_groups)
        room = self.layout.num_room_tokens
        self.block_tables: DraftBlockTables = with_room(block_tables, room)

    @property
    def limit(self) -> int:
        """First position that must be neither drafted nor written.

        Asked for each step: the engine may lower max_model_len to fit its KV cache.
        """
        limit = self.vllm_config.model_config.max_model_len
        return min(limit, draft_limit(self.speculative_config, limit))

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return attention_config(self.draft_vllm_config, self.layout)

    @property
    def draft_vllm_config(self) -> VllmConfig:
        """The config that the draft model was loaded with, as to its KV cache."""
        return self.vllm_config

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        pass  # every pass is eager

    def capture(self) -> None:
        pass  # every pass is eager

    @abstractmethod
    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        """What the first pass is fed of the target's hidden states."""

    @abstractmethod
    def model_inputs(self, num_tokens: int) -> dict[str, torch.Tensor | None]:
        """The model's arguments, from the buffers."""

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
        num_reqs = input_batch.num_reqs
        self._copy_request_inputs(
            num_reqs, input_batch.idx_mapping, temperature, seeds, dummy_run
        )
        hidden = self.target_hidden(last_hidden_states, aux_hidden_states)
        if dummy_run and skip_attn_for_dummy_run:
            self._profile(input_batch)
            return self.draft_tokens[:num_reqs]
        batch = VerifiedBatch(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.query_start_loc[: num_reqs + 1],
            self.idx_mapping[:num_reqs],
            num_sampled,
            num_rejected,
            last_sampled,
            next_prefill_tokens[0],
        )
        drafts = self.num_speculative_steps
        if num_speculative_tokens is not None:
            drafts = num_speculative_tokens
        self._run_passes(batch, input_batch, hidden, drafts, dp_sync_state)
        return self.draft_tokens[:num_reqs]

    def _run_passes(
        self,
        verified: VerifiedBatch,
        batch: InputBatch,
        hidden: HiddenRows | None,
        num_drafts: int,
        sync: DPSyncState | None,
    ) -> None:
        num_reqs = batch.num_reqs
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        self.block_tables.fit(num_reqs, longest)
        # Without drafts the first pass still runs: it writes the verified tokens' KV.
        samples_per_pass = self.layout.samples_per_pass(num_drafts) or [0]
        for draft_pass, samples in enumerate(samples_per_pass):
            source = self._previous(num_reqs, draft_pass) if draft_pass else verified
            shape = self._shape(batch, draft_pass, sync)
            self._prepare(source, batch, shape, hidden, max(samples, 1))
            last, feedback = self._run_model(batch, shape)
            if samples:
                self._sample(last, num_reqs, draft_pass, samples)
                hidden = self.fed_back(feedback, num_reqs)

    def _previous(self, num_reqs: int, draft_pass: int) -> PreviousPass:
        return PreviousPass(
            self.draft_tokens[:num_reqs], self.idx_mapping[:num_reqs], draft_pass
        )

    def fed_back(self, feedback: torch.Tensor, num_reqs: int) -> HiddenRows | None:
        """What a later pass is fed of the drafter's own hidden states."""
        return None

    def _shape(
        self, batch: InputBatch, draft_pass: int, sync: DPSyncState | None
    ) -> _Shape:
        n, layout, is_first = batch.num_reqs, self.layout, draft_pass == 0
        added = layout.num_extra_slots if is_first else layout.num_follow_slots
        query_start_loc = self.arange_np[: n + 1] * added
        if is_first:
            query_start_loc = query_start_loc + batch.query_start_loc_np[: n + 1]
        step = layout.num_extra_slots + draft_pass * layout.parallel_width
        if sync is None:
            return _Shape(query_start_loc, int(query_start_loc[-1]), None, step)
        # Every rank pads to what the ranks told each other of the target's batch.
        target = sync.num_tokens_across_dp
        across = (target if is_first else 0 * target) + sync.num_reqs * added
        return _Shape(query_start_loc, int(across[self.dp_rank]), across, step)

    def _prepare(
        self,
        source: VerifiedBatch | PreviousPass,
        batch: InputBatch,
        shape: _Shape,
        hidden: HiddenRows | None,
        num_samples: int,
    ) -> None:
        prepare_inputs(
            source,
            self.layout,
            self.input_buffers,
            self.block_tables,
            num_samples=num_samples,
            num_padded_tokens=shape.num_tokens,
            limit=self.limit,
            max_query_len=int(batch.num_scheduled_tokens.max()),
            mask_token_id=self.mask_token_id,
            hidden=hidden,
        )

    def _run_model(
        self, batch: InputBatch, shape: _Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_reqs, slots = batch.num_reqs, self.input_buffers.slot_mappings
        desc = BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=shape.num_tokens, num_reqs=num_reqs
        )
        self.draft_max_seq_len = (
            self.vllm_config.model_config.max_model_len + self.layout.num_room_tokens
        )
        metadata = self._build_attn_metadata(
            num_reqs,
            desc,
            shape.query_start_loc,
            batch.seq_lens_cpu_upper_bound,
            step=shape.step,
            slot_mappings=slots[:, : int(shape.query_start_loc[-1])],
        )
        by_layer = build_slot_mappings_by_layer(
            slots[:, : shape.num_tokens], self.kv_cache_config
        )
        return self._forward(shape.num_tokens, metadata, by_layer, shape.across_dp)

    def _forward(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states to sample from, and those to feed back."""
        self._prepare_eplb_forward(num_tokens)
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            output = self.model(**self.model_inputs(num_tokens))
        return output if isinstance(output, tuple) else (output, output)

    def _sample(
        self, hidden_states: torch.Tensor, num_reqs: int, draft_pass: int, samples: int
    ) -> None:
        """Draws drafts from the sampled slots of a pass into `draft_tokens`."""
        buffers, width = self.input_buffers, self.layout.parallel_width

        def kept(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: num_reqs * width].view(num_reqs, width)[:, :samples]

        columns = self.sample_columns[draft_pass, :num_reqs, :samples]
        tokens = self.sample_draft(
            hidden_states[kept(buffers.sample_rows).flatten()],
            kept(buffers.sample_positions).flatten(),
            kept(buffers.sample_requests).flatten(),
            self.temperature,
            self.seeds,
            columns.flatten(),
            self.draft_logits,
        )
        done = draft_pass * width
        drafts = self.draft_tokens[:num_reqs, done : done + samples]
        drafts.copy_(tokens.view(num_reqs, samples))

    def _profile(self, batch: InputBatch) -> None:
        """Runs the widest batch there can be, before there is a KV cache."""
        num_reqs = batch.num_reqs
        self.input_buffers.reset()
        num_tokens = self.layout.max_num_tokens(batch.num_tokens, num_reqs)
        last, _ = self._forward(num_tokens, None, None, None)
        samples = self.layout.samples_per_pass(self.num_speculative_steps)[0]
        self._sample(last, num_reqs, 0, samples)
