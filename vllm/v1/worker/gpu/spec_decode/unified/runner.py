# SPDX-License-Identifier: Apache-2.0
"""Runs the draft model over the batch in `DraftInputs`, with or without CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
)
from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .drafters.draft_model import Drafter
from .graphs import (
    DraftBatchDescriptor,
    DraftGraphs,
    DraftShape,
    StepShapes,
    batches_to_record,
)
from .inputs import DraftInputs, TargetStep
from .layout import DraftPlan
from .sampler import DraftSampler


class PassContext(NamedTuple):
    """How the draft model runs over the batch of a pass."""

    num_reqs: int
    num_tokens: int  # padding included
    attn_metadata: dict[str, Any] | None = None
    slot_mappings: dict[str, torch.Tensor] | None = None
    num_tokens_across_dp: torch.Tensor | None = None
    mode: CUDAGraphMode = CUDAGraphMode.NONE


class DraftRunner:
    """Runs the passes of a step, and captures them in CUDA graphs.

    Args:
        base: vLLM's side of the speculator: attention metadata, EPLB, the sizes of
            data-parallel groups.
        drafter: the draft model, and what its inputs are.
        inputs: the batch of each pass.
        sampler: samples each pass.

    Attributes:
        graphs: the captured CUDA graphs; None before capture.
    """

    graphs: DraftGraphs | None = None

    def __init__(
        self,
        base: DraftModelSpeculator,
        drafter: Drafter,
        inputs: DraftInputs,
        sampler: DraftSampler,
    ):
        self.base, self.drafter = base, drafter
        self.inputs, self.sampler = inputs, sampler

    # A step.

    def run(self, step: TargetStep, plan: DraftPlan, sync: DPSyncState | None) -> None:
        """Runs all passes of a step; the sampler has its drafts then."""
        shapes, drafter = self._shapes(step, sync), self.drafter
        verified = step.verified()
        hidden = drafter.target_hidden(step.last_hidden, step.aux_hidden)
        if drafter.keeps_states:
            drafter.keep(step, verified, hidden, ends=True)
        first = shapes.first(step.batch, plan)
        self.inputs.prepare(verified, plan, 0, first.num_tokens, hidden)
        self._run_passes(plan, range(1), step, first)
        if drafter.keeps_states:
            drafter.keep(step, verified, hidden, ends=False)
        if plan.layout.num_passes > 1:
            later = shapes.later(step.batch.num_reqs, plan)
            self._run_passes(plan, range(1, plan.layout.num_passes), step, later)
        self.sampler.finish(plan, step.batch.num_reqs)

    def _shapes(self, step: TargetStep, sync: DPSyncState | None) -> StepShapes:
        batch, base = step.batch, self.base
        longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        fits_graphs = self._fit_tables(batch.num_reqs, longest)
        most = self.drafter.layout.num_speculative_tokens + 1
        has_embeddings = self.inputs.multimodal is not None
        return StepShapes(
            self.graphs, base.dp_rank, sync, fits_graphs, most, has_embeddings
        )

    def _fit_tables(self, num_reqs: int, longest: int) -> bool:
        """Chooses rows; the metadata's longest sequence is one that they hold, as
        FlexAttention slices rows by it."""
        base, tables = self.base, self.inputs.tables
        fits_graphs = tables.fit(num_reqs, longest)
        base.draft_max_seq_len = min(base.max_model_len, tables.reach())
        return fits_graphs

    def _run_passes(
        self, plan: DraftPlan, passes: range, step: TargetStep, shape: DraftShape
    ) -> None:
        """Replays the graph of these passes, or runs them one by one."""
        base, n = self.base, step.batch.num_reqs
        if shape.is_full and base.supports_decode_metadata_update:
            self._replay(shape, passes.stop)
            return
        for draft_pass in passes:
            if draft_pass > 0:
                self._write_next(plan, draft_pass, n, shape.num_tokens)
            base._prepare_eplb_forward(shape.num_unpadded_tokens)
            context = self._context(plan, draft_pass, step, shape)
            if shape.is_full:
                self.graphs.run_pass(shape.graph, draft_pass)
            else:
                self.run_pass(plan, draft_pass, context)

    def _replay(self, shape: DraftShape, end_pass: int) -> None:
        """Replays a graph that refreshes its attention metadata and, for later passes,
        writes their inputs."""
        self.base._prepare_eplb_forward(shape.num_unpadded_tokens)
        for groups in self.base.attn_groups:
            for group in groups:
                tables = self.inputs.tables.input_block_tables
                group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
        self.graphs.run_until(shape.graph, end_pass)

    def _write_next(
        self, plan: DraftPlan, draft_pass: int, num_reqs: int, num_tokens: int
    ) -> None:
        """The inputs of a later pass: drafts of the one before, masks."""
        previous, hidden = self.sampler.previous(plan, num_reqs), None
        if (feedback := self.inputs.feedback) is not None:
            layout, is_second = plan.layout, draft_pass == 1
            fed = layout.parallel_width if is_second else layout.num_follow_samples
            hidden = self.drafter.feed_back(feedback[: num_reqs * fed])
        self.inputs.prepare(previous, plan, draft_pass, num_tokens, hidden)

    def _context(
        self, plan: DraftPlan, draft_pass: int, step: TargetStep, shape: DraftShape
    ) -> PassContext:
        layout, n, base = plan.layout, step.batch.num_reqs, self.base
        slots = self.inputs.batch.slot_mappings[:, : shape.num_tokens]
        real = shape.num_tokens if shape.is_full else shape.num_unpadded_tokens
        metadata = base._build_attn_metadata(
            n,
            shape.graph,
            shape.query_start_loc,
            step.batch.seq_lens_cpu_upper_bound,
            step=layout.num_extra_slots + draft_pass * layout.num_follow_samples,
            slot_mappings=slots[:, :real],
        )
        return PassContext(
            n,
            shape.num_tokens,
            metadata,
            build_slot_mappings_by_layer(slots, base.kv_cache_config),
            shape.num_tokens_across_dp,
            shape.graph.cg_mode,
        )

    # A pass.

    def run_pass(self, plan: DraftPlan, draft_pass: int, context: PassContext) -> None:
        """Forward, sample, keep hidden states for the next pass. What graphs capture
        is this too."""
        is_first, n = draft_pass == 0, context.num_reqs
        samples, feedback = plan.num_samples(draft_pass), self.inputs.feedback
        if plan.layout.num_beams > 1 and not is_first and context.attn_metadata:
            lengths = self.inputs.batch.seq_lens[:n]
            self.sampler.beams.attach(context.attn_metadata, draft_pass, lengths)
        with self._entered(context):
            output, states = self._forward(context, is_first)
            if samples == 0:
                return
            rows = self._sampled_rows(output, plan, n, is_first)
            self.sampler.sample(rows, plan, draft_pass)
        if feedback is not None and draft_pass + 1 < plan.layout.num_passes:
            if self.drafter.keeps_states:
                # The target has no hidden states of drafts yet.
                states = self.inputs.hidden_states(context.num_tokens, is_first)
            rows = self._sampled_rows(states, plan, n, is_first)
            feedback[: n * rows.shape[1]].view_as(rows).copy_(rows)

    def _forward(
        self, context: PassContext, is_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states to sample from, and those for the next pass."""
        num_tokens, mode = context.num_tokens, context.mode
        model = self.drafter.model
        inputs = self.drafter.model_inputs(self.inputs, num_tokens, is_first, mode)
        if mode == CUDAGraphMode.PIECEWISE:
            output = self.graphs.run_pw_graph(model, inputs)
        else:
            output = model(**inputs)
        return output if isinstance(output, tuple) else (output, output)

    @contextmanager
    def _entered(self, context: PassContext) -> Iterator[None]:
        """vLLM's forward context of a pass, and the drafter's ranks."""
        num_tokens = context.num_tokens
        forward_context = set_forward_context(
            context.attn_metadata,
            self.base.vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=context.num_tokens_across_dp,
            cudagraph_runtime_mode=context.mode,
            slot_mapping=context.slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        )
        with self.drafter.ranks(), forward_context:
            yield

    def _sampled_rows(
        self, states: torch.Tensor, plan: DraftPlan, num_reqs: int, is_first: bool
    ) -> torch.Tensor:
        """[num_reqs, W, H], or of beams [num_reqs, B, H], the rows at the sampled
        slots."""
        width = plan.layout.parallel_width
        if is_first:
            rows = self.inputs.batch.sample_rows[: num_reqs * width]
            return states.index_select(0, rows).view(num_reqs, width, -1)
        # In a later pass all requests have the same slots, so a view suffices.
        slots, width = plan.layout.num_follow_slots, plan.layout.num_follow_samples
        return states[: num_reqs * slots].view(num_reqs, slots, -1)[:, -width:]

    # Setup.

    def profile(
        self,
        batch: InputBatch,
        last: torch.Tensor,
        aux: list[torch.Tensor] | None,
        plan: DraftPlan,
    ) -> None:
        """Runs the widest possible pass, before there is a KV cache."""
        n, layout = batch.num_reqs, self.drafter.layout
        num_tokens = layout.max_num_tokens(batch.num_tokens, n)
        self.inputs.reset()
        if (hidden := self.drafter.target_hidden(last, aux)) is not None:
            self.inputs.fed_rows(hidden.fallback)
        self.base._prepare_eplb_forward(num_tokens)
        self.run_pass(plan, 0, PassContext(n, num_tokens))

    def init_graphs(
        self,
        vllm_config: VllmConfig,
        cudagraph_mode: CUDAGraphMode,
        plans: dict[int, DraftPlan],
    ) -> None:
        """Decides which batches `capture` captures.

        Args:
            vllm_config: the engine's.
            cudagraph_mode: what the target runs with.
        """
        base = self.base
        batches = batches_to_record(
            vllm_config,
            cudagraph_mode,
            plans,
            base.attn_cg_support.min_cg_support,
            piecewise=is_breakable_cudagraph_enabled()
            or has_compiled_submodule(self.drafter.model),
            fused=base.supports_decode_metadata_update,
        )
        mode = cudagraph_mode if batches else CUDAGraphMode.NONE
        self.graphs = DraftGraphs(base.vllm_config, base.device, mode, batches)

    def capture(self, plans: dict[int, DraftPlan]) -> None:
        def make(desc: DraftBatchDescriptor, warmup: bool = False):
            return self.captured(desc, plans)

        self.graphs.record(self.drafter.model, make)
        self.inputs.reset()

    def captured(
        self, desc: DraftBatchDescriptor, plans: dict[int, DraftPlan]
    ) -> Callable[[CUDAGraphMode], Any]:
        """Writes a dummy batch; returns the function that a graph captures on it."""
        across, dp_size = None, self.base.dp_size
        if dp_size > 1:
            across = torch.full((dp_size,), desc.num_tokens, dtype=torch.int32)
        if desc.cg_mode == CUDAGraphMode.PIECEWISE:
            self.inputs.reset()
            mixed = PassContext(0, desc.num_tokens, num_tokens_across_dp=across)
            return lambda mode: self._run_mixed(mixed._replace(mode=mode))
        context, plan = self._dummy_batch(desc, across), plans[desc.num_drafts]
        passes = range(desc.first_pass, desc.end_pass)
        return lambda _: self._run_captured(plan, passes, context)

    def _run_mixed(self, context: PassContext) -> None:
        with self._entered(context):
            self._forward(context, is_first=True)

    def _run_captured(
        self, plan: DraftPlan, passes: range, context: PassContext
    ) -> None:
        """One pass; or several whose attention metadata is refreshed in place, each
        with its inputs but the first."""
        base, n = self.base, context.num_reqs
        for draft_pass in passes:
            if base.supports_decode_metadata_update:
                if draft_pass > 0:
                    self._write_next(plan, draft_pass, n, context.num_tokens)
                base._update_draft_decode_metadata(context.attn_metadata, n)
            self.run_pass(plan, draft_pass, context)

    def _dummy_batch(
        self, desc: DraftBatchDescriptor, num_tokens_across_dp: torch.Tensor | None
    ) -> PassContext:
        n, batch, base = desc.num_reqs, self.inputs.batch, self.base
        self._fit_tables(n, longest=0)
        self.inputs.lay_out_evenly(n, desc.num_tokens)
        slots = batch.slot_mappings[:, : desc.num_tokens]
        starts = torch.arange(n + 1, dtype=torch.int32) * desc.num_tokens // n
        metadata = build_attn_metadata(
            attn_groups=base.attn_groups,
            num_reqs=n,
            num_tokens=desc.num_tokens,
            query_start_loc_gpu=batch.query_start_loc[: n + 1],
            query_start_loc_cpu=starts,
            max_query_len=desc.uniform_token_count or desc.max_query_len,
            seq_lens=batch.seq_lens[:n],
            max_seq_len=base.draft_max_seq_len,
            block_tables=[rows[:n] for rows in self.inputs.tables.input_block_tables],
            slot_mappings=slots,
            kv_cache_config=base.kv_cache_config,
            seq_lens_cpu_upper_bound=starts.diff(),
            positions=batch.positions[: desc.num_tokens],
            is_prefilling=base.draft_is_prefilling[:n],
            for_cudagraph_capture=True,
        )
        by_layer = build_slot_mappings_by_layer(slots, base.kv_cache_config)
        return PassContext(n, desc.num_tokens, metadata, by_layer, num_tokens_across_dp)
