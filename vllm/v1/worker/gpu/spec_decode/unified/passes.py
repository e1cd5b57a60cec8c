# SPDX-License-Identifier: Apache-2.0
"""One pass of a drafter: forward, sample, keep what the next pass is fed."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafting import draft_limit, get_mask_token_id
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.logger import init_logger
from vllm.v1.worker.gpu.spec_decode.noise import draft_keys
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .block_tables import DraftBlockTables, with_room
from .buffers import DraftBuffers
from .draft_config import (
    attention_config,
    draft_layout,
    draft_lengths,
    widened_config,
)
from .graphs import DraftGraphs, first_pass_twins
from .inputs import HiddenRows, PreviousPass, prepare_inputs
from .layout import DraftLayout

logger = init_logger(__name__)


class Drafts(NamedTuple):
    """A step's drafts: how many, over which slots."""

    num_drafts: int
    layout: DraftLayout
    # [passes, R, W] int32, column of `draft_logits` for each sampled slot
    columns: torch.Tensor

    def num_samples(self, draft_pass: int) -> int:
        """Drafts sampled in a pass. Without drafts the first pass still runs: it
        writes the verified tokens' KV."""
        left = self.num_drafts - draft_pass * self.layout.parallel_width
        return min(left, self.layout.parallel_width)


class DraftPasses(DraftModelSpeculator):
    """What is common to a pass that runs and a pass that is recorded."""

    # The drafter's width is its own affair: the target runs at its whole budget.
    num_query_per_req = 1
    num_extra_query_per_req = 0
    # Width of the hidden states that a later pass is fed; None if it takes none.
    fed_hidden_size: int | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.layout = draft_layout(vllm_config)
        # The engine's own: its capture sizes are settled after this.
        self.target_config = vllm_config
        super().__init__(widened_config(vllm_config, self.layout), device)
        self.mask_token_id = 0
        if self.layout.num_masks:
            self.mask_token_id = get_mask_token_id(self.draft_model_config.hf_config)
        buffers = DraftBuffers(
            self.layout,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self.max_num_reqs,
            device,
            self.fed_hidden_size,
            self.dtype,
        )
        self.input_buffers: DraftBuffers = buffers
        self.temperature, self.seeds = buffers.temperature, buffers.seeds
        self.idx_mapping = buffers.idx_mapping
        self.lengths = {k: self._drafts(k) for k in draft_lengths(vllm_config)}
        layouts = {k: drafts.layout for k, drafts in self.lengths.items()}
        self.first_pass_twins = first_pass_twins(layouts)
        self.graphs: DraftGraphs | None = None
        self.verifies_blocks = (
            self.speculative_config.rejection_sample_method == "block"
        )
        self._say_memory()

    def _say_memory(self) -> None:
        if self.draft_logits is not None:
            logger.info(
                "Draft probabilities take %.3f GiB: logits of %d requests x %d drafts "
                "x %d tokens, %s. Lower max_num_seqs to save memory.",
                self.draft_logits.nbytes / 2**30,
                *self.draft_logits.shape,
                self.draft_logits.dtype,
            )

    def _drafts(self, num_drafts: int) -> Drafts:
        layout = self.layout.for_drafts(num_drafts)
        passes, width = layout.num_passes, layout.parallel_width
        columns = torch.arange(passes * width, dtype=torch.int32, device=self.device)
        columns = columns.view(passes, 1, width).repeat(1, self.max_num_reqs, 1)
        return Drafts(num_drafts, layout, columns)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if self.draft_logits is None and self._may_rank_own_vocabulary():
            self.use_local_argmax_reduction = True

    def _may_rank_own_vocabulary(self) -> bool:
        """Whether the best token is found without logits of the whole vocabulary.

        It is the same token. A head of fewer tokens need not spread their logits over
        the target's vocabulary, and ranks of a tensor-parallel group exchange their
        best tokens, not their logits.
        """
        if not hasattr(self.model, "get_top_tokens"):
            return False
        ids = getattr(self.model, "draft_id_to_target_id", None)
        # Without weights to load (load_format="dummy") the base gives a head of fewer
        # tokens the target's lm_head, the end of which is none of its tokens.
        has_own = ids is not None and self.model.lm_head.org_vocab_size == len(ids)
        ranks = self.speculative_config.draft_parallel_config.tensor_parallel_size
        return (has_own or ranks > 1) and self.model.logits_processor.scale > 0

    def set_attn(self, model_state, kv_cache_config, block_tables, *args) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.input_buffers.allocate_kv_groups(block_tables.num_kv_cache_groups)
        room = self.layout.num_room_tokens
        own = [number for number, found in enumerate(self.attn_groups) if found]
        self.block_tables: DraftBlockTables = with_room(block_tables, room, own)
        self.draft_max_seq_len = self.max_model_len

    def _configure_decode_metadata_update(self) -> None:
        mode = self.target_config.compilation_config.cudagraph_mode
        if mode == CUDAGraphMode.NONE:
            # Only graphs gain by it: no reason to say that it is not there.
            self.supports_decode_metadata_update = False
            return
        super()._configure_decode_metadata_update()

    @property
    def max_model_len(self) -> int:
        """The longest sequence that attention may meet: padding slots count too."""
        target = self.vllm_config.model_config.max_model_len
        return target + self.layout.num_room_tokens

    @max_model_len.setter
    def max_model_len(self, value: int) -> None:
        pass  # the base's __init__ sets the target's

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

    @abstractmethod
    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        """What the first pass is fed of the target's hidden states."""

    @abstractmethod
    def fed_back(self, rows: torch.Tensor) -> HiddenRows | None:
        """What a later pass is fed of the drafter's own hidden states."""

    @abstractmethod
    def model_inputs(
        self, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> dict[str, torch.Tensor | None]:
        """The model's arguments, from the buffers."""

    def _prepare_later(
        self,
        drafts: Drafts,
        draft_pass: int,
        num_reqs: int,
        num_tokens: int,
    ) -> None:
        feedback, hidden = self.input_buffers.feedback, None
        if feedback is not None:
            width = drafts.layout.parallel_width
            hidden = self.fed_back(feedback[: num_reqs * width])
        prepare_inputs(
            PreviousPass(self.draft_tokens[:num_reqs], draft_pass),
            drafts.layout,
            self.input_buffers,
            self.block_tables,
            num_samples=drafts.num_samples(draft_pass),
            num_padded_tokens=num_tokens,
            limit=self.limit,
            max_query_len=0,
            mask_token_id=self.mask_token_id,
            hidden=hidden,
        )

    def _run_pass(
        self,
        drafts: Drafts,
        draft_pass: int,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Forward and sample, over a batch that is laid out in the buffers."""
        is_first, layout = draft_pass == 0, drafts.layout
        last, own = self._forward(
            num_tokens,
            is_first,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            mode,
        )
        samples, feedback = drafts.num_samples(draft_pass), self.input_buffers.feedback
        if samples == 0:
            return
        rows = self._sampled_rows(last, layout, num_reqs, is_first)
        self._sample(rows[:, :samples], drafts, draft_pass)
        if feedback is not None and draft_pass + 1 < layout.num_passes:
            if own is not last:
                rows = self._sampled_rows(own, layout, num_reqs, is_first)
            feedback[: num_reqs * layout.parallel_width].view_as(rows).copy_(rows)

    def _forward(
        self,
        num_tokens: int,
        is_first: bool,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states to sample from, and those to feed back."""
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=num_tokens_across_dp,
            cudagraph_runtime_mode=mode,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        ):
            inputs = self.model_inputs(num_tokens, is_first, mode)
            if mode == CUDAGraphMode.PIECEWISE:
                output = self.graphs.run_pw_graph(self.model, inputs)
            else:
                output = self.model(**inputs)
        return output if isinstance(output, tuple) else (output, output)

    def _sampled_rows(
        self,
        hidden_states: torch.Tensor,
        layout: DraftLayout,
        num_reqs: int,
        is_first: bool,
    ) -> torch.Tensor:
        """[num_reqs, W, H], the rows at the sampled slots."""
        width = layout.parallel_width
        if is_first:
            rows = self.input_buffers.sample_rows[: num_reqs * width]
            return hidden_states[rows].view(num_reqs, width, -1)
        # In a later pass all requests are alike: a view does it.
        slots = layout.num_follow_slots
        return hidden_states[: num_reqs * slots].view(num_reqs, slots, -1)[:, -width:]

    def _sample(
        self, hidden_states: torch.Tensor, drafts: Drafts, draft_pass: int
    ) -> None:
        """Draws drafts at slots [num_reqs, samples, H] of a pass."""
        num_reqs, samples, size = hidden_states.shape
        buffers, width = self.input_buffers, drafts.layout.parallel_width

        def sampled(tensor: torch.Tensor) -> torch.Tensor:
            by_request = tensor[: num_reqs * width].view(num_reqs, width)
            return by_request[:, :samples].flatten()

        keys = sampled(buffers.sample_positions)
        columns = drafts.columns[draft_pass, :num_reqs, :samples].flatten()
        if self.draft_logits is not None:
            most = self.num_speculative_steps
            keys = draft_keys(keys, columns, most, self.verifies_blocks)
        tokens = self.sample_draft(
            hidden_states.reshape(-1, size),
            keys,
            sampled(buffers.sample_requests),
            self.temperature,
            self.seeds,
            columns,
            self.draft_logits,
        )
        done = draft_pass * width
        self.draft_tokens[:num_reqs, done : done + samples] = tokens.view(
            num_reqs, samples
        )
