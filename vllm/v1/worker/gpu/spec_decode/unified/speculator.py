# SPDX-License-Identifier: Apache-2.0
"""The draft step, shared by all kinds of drafters: `UnifiedSpeculator.propose`."""

from typing import Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import MIN_REQUESTS, depth_of, least_trimmed
from vllm.logger import init_logger
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.draft_tree.accepted import TargetStep
from vllm.v1.worker.gpu.spec_decode.draft_tree.step import make_tree_step
from vllm.v1.worker.gpu.spec_decode.quick_estimator import QuickEstimator

from .block_tables import DraftBlockTables
from .buffers import DraftBuffers
from .draft_config import attention_config, draft_lengths, widened_config
from .drafter import Drafter
from .embeddings import rows_of_embeddings
from .graphs import make_graphs
from .inputs import HiddenRows
from .passes import DraftPasses
from .plan import DraftPlan, PassContext, draft_plans
from .structs import VerifiedBatch
from .window import WindowedBlockTables

logger = init_logger(__name__)


class UnifiedSpeculator(DraftPasses):
    """Drafts with any model whose mode `layout.py` covers.

    Attributes:
        plans: by the number of drafts that a step asks for.
        tree_step: the draft trees to verify; None if chains are drafted.
    """

    # The drafter has its own token budget: the extra slots take none of the target's.
    num_query_per_req = 1
    num_extra_query_per_req = 0
    _least_predicted = MIN_REQUESTS  # requests of a batch with acceptance estimates

    num_room_tokens = 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device, drafter: Drafter):
        self.drafter, self.layout = drafter, drafter.layout
        # The engine's own config, not a copy: its capture sizes are set later.
        self.target_config = vllm_config
        super().__init__(widened_config(vllm_config, self.layout), device)
        # vLLM's own would trim every step; `trimming.py` trims only some of them.
        self.enable_adaptive_verification = False
        self._num_reqs = 0  # of the current pass
        # Drafts, and the logits kept with them, use the target's vocabulary.
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        kept = self.draft_logits
        if kept is not None and kept.shape[2] != self.vocab_size:
            self.draft_logits = kept.new_zeros(*kept.shape[:2], self.vocab_size)
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        fed = drafter.fed_hidden_size, self.dtype
        self.buffers = DraftBuffers(
            self.layout, budget, self.max_num_reqs, device, *fed, drafter.rope_dims
        )
        self._use_batch()
        # The `idx_mapping` of dummy runs: their requests have no state and no KV.
        self.no_requests = torch.full_like(self.idx_mapping, -1)
        self.tree_step = make_tree_step(vllm_config, self.layout, device)
        self.plans = self._make_plans()
        self.graphs = None
        spec = self.speculative_config
        # With block verification, vLLM's keys of noise: see noise.py.
        self.has_draft_noise = spec.rejection_sample_method == "block"
        self.draft_window = spec.draft_window
        self._log_sizes()

    # A draft step.

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
            [num_reqs, K] int64 draft tokens; the first `num_speculative_tokens` are
            valid.
        """
        batch, n, k = input_batch, input_batch.num_reqs, num_speculative_tokens
        if dummy_run and skip_attn_for_dummy_run:
            states = self.drafter.target_hidden(last_hidden_states, aux_hidden_states)
            self._profile(batch, states)
            return self.draft_tokens[:n]
        step = TargetStep(
            batch,
            num_rejected,
            last_hidden_states,
            aux_hidden_states,
            self.block_tables.target.slot_mappings,
            self._rope_positions(),
        )
        if self.tree_step is not None:
            # Keeps only the accepted path of each tree.
            step = self.tree_step.accept(step, num_sampled, dummy_run)
        if not dummy_run and self._is_past_limit(batch):
            # The runner writes -1 over drafts that a shorter step did not ask for.
            return self.draft_tokens[:n].clamp(min=0)
        plan = self.plans[max(self.plans) if k is None else k]
        batch = step.batch
        hidden = self.drafter.target_hidden(step.last_hidden, step.aux_hidden)
        verified = VerifiedBatch(
            batch.input_ids,
            batch.positions,
            batch.query_start_loc[: n + 1],
            self.no_requests[:n] if dummy_run else batch.idx_mapping,
            num_sampled,
            step.num_rejected,
            last_sampled,
            next_prefill_tokens[0],
            temperature,
            seeds,
            step.rope_positions,
            self._rope_deltas(),
        )
        self.buffers.multimodal = rows_of_embeddings(
            mm_inputs, input_batch, batch, plan.layout
        )
        self._run_passes(plan, step, verified, hidden, dp_sync_state)
        return self.draft_tokens[:n]

    # Acceptance estimates, for large batches of which only some drafts are verified.

    def _maybe_predict_acceptance(self, *args) -> None:
        if self._num_reqs >= self._least_predicted:
            super()._maybe_predict_acceptance(*args)

    def observe_verification(self, *args) -> None:
        """Left to `trimming.py`, which knows which drafts have estimates."""

    # Setup.

    def draft_chains(self) -> None:
        """Drafts chains instead of trees; the schedule has been changed to them."""
        self.tree_step = None
        self.plans = self._make_plans()

    def _make_plans(self) -> dict[int, DraftPlan]:
        most = self.layout.num_speculative_tokens
        spec = self.target_config.speculative_config
        depths = {
            k: depth_of(spec, k)
            for k in draft_lengths(self.target_config)
            if self.tree_step is not None or k <= most
        }
        return draft_plans(self.layout, depths, self.max_num_reqs, self.device)

    def _profile(self, batch: InputBatch, hidden: HiddenRows | None) -> None:
        """Runs the widest possible batch, before there is a KV cache."""
        self.buffers.reset()
        if hidden is not None:
            self.buffers.fed_rows(hidden.fallback)
        num_tokens = self.layout.max_num_tokens(batch.num_tokens, batch.num_reqs)
        self._prepare_eplb_forward(num_tokens)
        plan = self.plans[max(self.plans)]
        self.run_pass(plan, 0, PassContext(batch.num_reqs, num_tokens))

    def _use_batch(self) -> None:
        """Exposes the tensors of the draft batch under vLLM's attribute names."""
        batch = self.buffers.batch
        self.input_buffers, self.idx_mapping = batch, batch.idx_mapping
        self.temperature, self.seeds = batch.temperature, batch.seeds
        self.sampled_slots = {}

    def _log_sizes(self) -> None:
        logger.info(
            "Unified speculator: passes per step %d, slots per pass at most %d, draft "
            "sampling %s.",
            self.layout.num_passes,
            self.buffers.batch.max_num_tokens,
            self.speculative_config.draft_sample_method,
        )
        if self.draft_logits is not None:
            log_draft_logits(self.draft_logits)

    @property
    def tapped_layers(self) -> tuple[int, ...]:
        """Target layers whose hidden states are needed besides its output."""
        return self.drafter.tapped_layers

    @property
    def limit(self) -> int:
        """First position that must be neither drafted nor written.

        Read in each step: the engine may lower max_model_len to fit its KV cache.
        """
        limit = self.vllm_config.model_config.max_model_len
        return self.speculative_config.drafter.limit(limit)

    def _rope_positions(self) -> torch.Tensor | None:
        """[D, at least num_tokens], the target's M-RoPE positions, if it is fed any."""
        return self.model_state.rope_state.positions if self.drafter.rope_dims else None

    def _rope_deltas(self) -> torch.Tensor | None:
        """[R], by request state: M-RoPE minus plain positions, past the prompt."""
        rope = self.model_state.rope_state if self.drafter.rope_dims else None
        return rope and rope.prefill_delta.gpu

    def _is_past_limit(self, batch: InputBatch) -> bool:
        """Whether all requests are past the drafter's limit, so drafting is useless.

        The host only has upper bounds of sequence lengths: drafts of steps in flight
        may yet be rejected. Data-parallel ranks run in lockstep, so they never skip.
        """
        parallel = self.target_config.parallel_config
        limit = self.limit
        if limit >= self.vllm_config.model_config.max_model_len or self.dp_size > 1:
            return False
        num_steps = parallel.pipeline_parallel_size + 1
        uncertain = num_steps * (self.num_speculative_steps + 1)
        ends = batch.seq_lens_cpu_upper_bound[: batch.num_reqs].numpy()
        starts = ends - batch.num_scheduled_tokens
        return int(starts.min()) - uncertain >= limit

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        return self.drafter.load(target_model, self.vllm_config)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.supports_mm_inputs = self.drafter.takes_embeddings
        if self.use_acceptance_estimator:
            # vLLM's has a column per tree node, but trees have no estimates.
            depth = self.layout.num_speculative_tokens
            sizes = self.max_num_reqs, depth, self.device
            self.acceptance_estimator = QuickEstimator(*sizes)
            self._least_predicted = least_trimmed(self.speculative_config)
        else:
            self.predict_nothing()

    def predict_nothing(self) -> None:
        """Turns acceptance estimation off; to be called before graph capture."""
        self.use_acceptance_estimator, self.acceptance_estimator = False, None
        if self.draft_logits is None and self._ranks_exchange_best():
            self.use_local_argmax_reduction = True

    def _ranks_exchange_best(self) -> bool:
        """Whether tensor-parallel ranks can exchange their best tokens instead of
        logits, which gives the same token."""
        ranks = self.speculative_config.draft_parallel_config.tensor_parallel_size
        can = ranks > 1 and hasattr(self.model, "get_top_tokens")
        return can and self.model.logits_processor.scale > 0

    @property
    def max_model_len(self) -> int:
        return self.vllm_config.model_config.max_model_len + self.num_room_tokens

    def set_attn(self, model_state, kv_cache_config, block_tables, *args) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.buffers.allocate_kv_groups(block_tables.num_kv_cache_groups)
        self._use_batch()
        room = self.layout.num_room_tokens
        own = [number for number, found in enumerate(self.attn_groups) if found]
        self.block_tables = self._tables(block_tables, room, own)
        # The longest sequence that attention sees: padding slots count too.
        self.num_room_tokens = room
        self.draft_max_seq_len = self.max_model_len
        self.drafter.set_kv_cache(kv_cache_config, block_tables, own[0])

    def _tables(
        self, target: BlockTables, room: int, own: list[int]
    ) -> DraftBlockTables:
        if self.draft_window is None:
            return DraftBlockTables(target, room, own)
        return WindowedBlockTables(target, room, own, self.draft_window)

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return attention_config(self.drafter.cache_config_owner, self.layout)

    def _configure_decode_metadata_update(self) -> None:
        mode = self.target_config.compilation_config.cudagraph_mode
        if mode == CUDAGraphMode.NONE and self.device.type != "cpu":
            # Only graphs need it: do not log that it is unsupported. On a CPU building
            # metadata anew takes a tenth of a small drafter's pass.
            self.supports_decode_metadata_update = False
            return
        super()._configure_decode_metadata_update()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = make_graphs(self, cudagraph_mode)

    def capture(self) -> None:
        self.graphs.record(self)


def log_draft_logits(logits: torch.Tensor) -> None:
    """Logs the memory that probabilistic drafts take.

    Args:
        logits: [requests, drafts, vocabulary].
    """
    logger.info(
        "Draft probabilities take %.3f GiB: logits of %d requests x %d drafts x %d "
        "tokens, %s. Lower max_num_seqs to save memory.",
        logits.nbytes / 2**30,
        *logits.shape,
        logits.dtype,
    )
