# SPDX-License-Identifier: Apache-2.0
"""The draft step, shared by all kinds of drafters: `UnifiedSpeculator.propose`."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.length import MIN_REQUESTS, depth_of
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .config import attention_config, draft_lengths, widened_config
from .drafters import drafter_class
from .graphs import DraftGraphs
from .inputs import (
    DraftBlockTables,
    DraftInputs,
    DraftLimits,
    TargetStep,
    WindowedBlockTables,
    rows_of_embeddings,
)
from .layout import DraftPlan, draft_plans
from .runner import DraftRunner
from .sampler import DraftSampler
from .tree.attend import why_layer_cannot
from .tree.grow import Beams
from .tree.step import TreeStep, make_tree_step

logger = init_logger(__name__)


class UnifiedSpeculator(DraftModelSpeculator):
    """Drafts with any model whose mode `layout.py` covers.

    vLLM's side of the draft step: its parts are made here, and `propose` runs them.

    Attributes:
        drafter: the draft model, and what its inputs are.
        layout: slots of the longest chain.
        plans: by the number of drafts that a step asks for.
        inputs: the batch of each pass.
        sampler: samples each pass.
        runner: runs the passes.
    """

    plans: dict[int, DraftPlan]
    least_predicted = MIN_REQUESTS  # requests of a batch with acceptance estimates

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.drafter = drafter = drafter_class(vllm_config)(vllm_config, device)
        self.layout = drafter.layout
        self.tapped_layers = drafter.tapped_layers
        # The engine's own config, not a copy: its capture sizes are set later.
        self.target_config = vllm_config
        super().__init__(widened_config(vllm_config, self.layout), device)
        # vLLM's own would trim every step; `trimming.py` trims only some of them.
        self.enable_adaptive_verification = False
        # Drafts, and the logits kept with them, use the target's vocabulary.
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        kept = self.draft_logits
        if kept is not None and kept.shape[2] != self.vocab_size:
            self.draft_logits = kept.new_zeros(*kept.shape[:2], self.vocab_size)
        spec = self.speculative_config
        # With block verification, vLLM's keys of noise: see verification.py.
        self.has_draft_noise = spec.rejection_sample_method == "block"
        self.inputs = DraftInputs(
            self.layout,
            vllm_config.scheduler_config.max_num_batched_tokens,
            self.max_num_reqs,
            device,
            drafter.fed_hidden_size,
            self.dtype,
            drafter.rope_dims,
        )
        self._use_batch()
        logit_bytes = vllm_config.model_config.head_dtype.itemsize
        self.sampler = DraftSampler(
            self.draft_tokens, self.inputs, self._sample, logit_bytes
        )
        depth = self.layout.num_speculative_tokens
        self.sampler.trees = make_tree_step(vllm_config, depth, device)
        self.runner = DraftRunner(self, drafter, self.inputs, self.sampler)
        self._make_plans()
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
        n, k = input_batch.num_reqs, num_speculative_tokens
        longest = max(self.plans)
        # If trees turned out not to be supported, warm-up steps ask for their nodes.
        plan = self.plans[longest if k is None else min(k, longest)]
        if dummy_run and skip_attn_for_dummy_run:
            self.runner.profile(
                input_batch, last_hidden_states, aux_hidden_states, plan
            )
            return self.draft_tokens[:n]
        if dummy_run and dp_sync_state is not None:
            # The ranks agreed on sizes for fewer requests than the target's graph has.
            n = min(n, dp_sync_state.num_reqs)
            input_batch = replace(input_batch, num_reqs=n)
        rope = self.model_state.rope_state if self.drafter.rope_dims else None
        step = TargetStep(
            input_batch,
            num_sampled,
            num_rejected,
            self.block_tables.target.slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            dummy_run,
            last_sampled,
            next_prefill_tokens[0],
            temperature,
            seeds,
            rope and rope.positions,
            rope and rope.prefill_delta.gpu,
        )
        if self.tree_step is not None:
            # Keeps only the accepted path of each tree.
            step = self.tree_step.accept(step)
        if not dummy_run and self._is_past_limit(input_batch):
            # The runner writes -1 over drafts that a shorter step did not ask for.
            return self.draft_tokens[:n].clamp(min=0)
        self.inputs.multimodal = rows_of_embeddings(
            mm_inputs, input_batch, step.batch, plan.layout
        )
        self.runner.run(step, plan, dp_sync_state)
        return self.draft_tokens[:n]

    @property
    def tree_step(self) -> TreeStep | None:
        """The draft trees to verify; None if chains are drafted."""
        return self.sampler.trees

    @property
    def graphs(self) -> DraftGraphs | None:
        return self.runner.graphs

    # Sampling, by vLLM's own method: with its noise, watermarks, acceptance estimates.

    def _sample(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        requests: torch.Tensor,
        columns: torch.Tensor,
    ) -> torch.Tensor:
        keys = self.temperature, self.seeds, columns, self.draft_logits
        return self.sample_draft(hidden_states, positions, requests, *keys)

    def compute_draft_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        return self.drafter.vocabulary.logits(self.model, hidden_states)

    def get_draft_top_tokens(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        return self.drafter.vocabulary.best_tokens(self.model, hidden_states)

    def _maybe_predict_acceptance(self, *args) -> None:
        """Only of large batches, of which only some drafts are verified."""
        if self.sampler.num_reqs >= self.least_predicted:
            super()._maybe_predict_acceptance(*args)

    def observe_verification(self, *args) -> None:
        """Left to `trimming.py`, which knows which drafts have estimates."""

    # Setup.

    def draft_chains(self) -> None:
        """Drafts chains instead of trees; the schedule has been changed to them."""
        self.sampler.trees = None
        self._make_plans()

    def _make_plans(self) -> None:
        most, spec = self.layout.num_speculative_tokens, self.speculative_config
        has_trees = self.tree_step is not None
        lengths = draft_lengths(self.target_config)
        depths = {k: depth_of(spec, k) for k in lengths if has_trees or k <= most}
        self.plans = draft_plans(self.layout, depths)
        if has_trees and self.layout.num_passes > 1:
            sizes = self.max_num_reqs, most, self.layout.num_beams
            self.sampler.beams = Beams(*sizes, self.device)

    def _use_batch(self) -> None:
        """Exposes the tensors of the draft batch under vLLM's attribute names."""
        batch = self.inputs.batch
        self.input_buffers, self.idx_mapping = batch, batch.idx_mapping
        self.temperature, self.seeds = batch.temperature, batch.seeds

    def _log_sizes(self) -> None:
        logger.info(
            "Unified speculator: passes per step %d, slots per pass at most %d, draft "
            "sampling %s.",
            self.layout.num_passes,
            self.inputs.batch.max_num_tokens,
            self.speculative_config.draft_sample_method,
        )
        if self.draft_logits is not None:
            logger.info(
                "Draft probabilities take %.3f GiB: logits of %d requests x %d drafts "
                "x %d tokens, %s. Lower max_num_seqs to save memory.",
                self.draft_logits.nbytes / 2**30,
                *self.draft_logits.shape,
                self.draft_logits.dtype,
            )

    def _is_past_limit(self, batch: InputBatch) -> bool:
        """Whether all requests are past the drafter's limit, so drafting is useless.

        The host only has upper bounds of sequence lengths: drafts of steps in flight
        may yet be rejected. Data-parallel ranks run in lockstep, so they never skip.
        """
        parallel = self.target_config.parallel_config
        limit = self.inputs.limits.max_len
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
        self.sampler.model = self.model
        self.sampler.vocabulary = self.drafter.vocabulary
        self.supports_mm_inputs = self.drafter.takes_embeddings
        self._check_beams()
        if not self.use_acceptance_estimator:
            self.predict_nothing()

    def _check_beams(self) -> None:
        """Continues one node a pass if the draft model cannot attend to several."""
        if self.layout.num_beams == 1 or self.layout.num_passes == 1:
            return
        names = self.draft_attn_layer_names
        layers = get_layers_from_vllm_config(
            self.vllm_config, AttentionLayerBase, names
        )
        found = next(filter(None, map(why_layer_cannot, layers.values())), None)
        if found is not None:
            logger.warning(
                "Each pass of a draft tree continues one node instead of %d, which "
                "gives smaller trees: the draft model has %s.",
                self.layout.num_beams,
                found,
            )
            self.layout = replace(self.layout, num_beams=1)
            self._make_plans()

    def predict_nothing(self) -> None:
        """Turns acceptance estimation off; to be called before graph capture."""
        self.use_acceptance_estimator, self.acceptance_estimator = False, None
        # Tensor-parallel ranks can exchange their best tokens instead of logits, which
        # gives the same token.
        ranks = self.speculative_config.draft_parallel_config.tensor_parallel_size
        can = ranks > 1 and hasattr(self.model, "get_top_tokens")
        if self.draft_logits is None and can:
            is_same = self.model.logits_processor.scale > 0
            self.use_local_argmax_reduction |= is_same

    @property
    def max_model_len(self) -> int:
        """The longest sequence that attention sees: padding slots count too."""
        room = self.layout.num_room_tokens
        return self.vllm_config.model_config.max_model_len + room

    def set_attn(self, model_state, kv_cache_config, block_tables, *args) -> None:
        super().set_attn(model_state, kv_cache_config, block_tables, *args)
        self.inputs.allocate_kv_groups(block_tables.num_kv_cache_groups)
        self._use_batch()
        own = [number for number, found in enumerate(self.attn_groups) if found]
        given = block_tables, self.layout.num_room_tokens, self.max_model_len, own
        window = self.speculative_config.draft_window
        if window is None:
            self.block_tables = DraftBlockTables(*given)
        else:
            self.block_tables = WindowedBlockTables(*given, window=window)
        self.inputs.tables = self.block_tables
        # The engine may have lowered max_model_len, to fit this KV cache.
        most = self.vllm_config.model_config.max_model_len
        limit = self.speculative_config.drafter.limit(most)
        tokens = self.drafter.mask_token_id, self.vocab_size
        self.inputs.limits = DraftLimits(*tokens, limit)
        self.drafter.set_kv_cache(kv_cache_config, block_tables, own[0])

    @property
    def attn_vllm_config(self) -> VllmConfig:
        return attention_config(self.drafter.cache_config_owner, self.layout)

    def _configure_decode_metadata_update(self) -> None:
        mode = self.target_config.compilation_config.cudagraph_mode
        if mode == CUDAGraphMode.NONE:
            # Only graphs need it: do not log that it is unsupported.
            self.supports_decode_metadata_update = False
            return
        super()._configure_decode_metadata_update()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.runner.init_graphs(self.target_config, cudagraph_mode, self.plans)

    def capture(self) -> None:
        self.runner.capture(self.plans)
