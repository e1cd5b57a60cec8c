# SPDX-License-Identifier: Apache-2.0
"""The passes of a draft step, with and without CUDA graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.cpu_schedule import of_later_passes
from vllm.v1.worker.gpu.spec_decode.draft_tree.accepted import TargetStep
from vllm.v1.worker.gpu.spec_decode.draft_tree.drafting import build_trees, sample_tree
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from .block_tables import DraftBlockTables
from .buffers import DraftBuffers
from .drafter import Drafter
from .graphs import DraftGraphs
from .inputs import HiddenRows, PreviousPass, prepare_inputs
from .layout import DraftLayout
from .plan import DraftPlan, PassContext
from .sampling import SampledSlots, sample_chain
from .shapes import DraftShape, StepShapes
from .slices import request_slices
from .structs import VerifiedBatch


class DraftPasses(DraftModelSpeculator):
    """Runs the passes of a step that `UnifiedSpeculator` has prepared.

    Attributes:
        drafter: how the draft model is loaded, and what its inputs are.
        layout: slots of the longest chain.
        buffers: the inputs of a step's passes.
        block_tables: those that passes read; set with the KV cache.
        graphs: the captured CUDA graphs; None before capture.
        sampled_slots: see `sampling.py`; by drafts of the plan, pass, and requests.
    """

    drafter: Drafter
    layout: DraftLayout
    buffers: DraftBuffers
    block_tables: DraftBlockTables
    graphs: DraftGraphs | None
    sampled_slots: dict[tuple[int, ...], list[SampledSlots]]

    def _run_passes(
        self,
        plan: DraftPlan,
        step: TargetStep,
        verified: VerifiedBatch,
        hidden: HiddenRows | None,
        sync: DPSyncState | None,
    ) -> None:
        batch = step.batch
        longest = int(batch.seq_lens_cpu_upper_bound[: batch.num_reqs].max())
        fits_graphs = self.block_tables.fit(batch.num_reqs, longest)
        most = self.layout.num_speculative_tokens + 1
        has_embeddings = self.buffers.multimodal is not None
        shapes = StepShapes(
            self.graphs,
            self.dp_rank,
            sync,
            fits_graphs,
            most,
            has_embeddings,
        )
        # The first pass: verified tokens, the next token, masks; W drafts are sampled.
        shape = shapes.first(batch, plan)
        keep_states, slots = self.drafter.keep_states, step.slot_mappings
        keep_states(verified, hidden, slots, is_launched=False)
        self._prepare_first(plan, verified, hidden, shape)
        metadata = None
        if self._is_self_contained(shape):
            self._replay(shape, end_pass=1)
        else:
            metadata = self._run(plan, 0, batch, shape)
        keep_states(verified, hidden, slots, is_launched=True)

        if plan.layout.num_passes == 1:
            return
        self._run_later(plan, batch, shapes.later(batch.num_reqs, plan), metadata)
        if plan.is_tree:
            build_trees(self, plan, batch.num_reqs)

    def _run_later(
        self,
        plan: DraftPlan,
        batch: InputBatch,
        shape: DraftShape,
        first: dict[str, Any] | None,
    ) -> None:
        """Later passes: drafts of the one before, masks; W more drafts are sampled.

        Args:
            first: the first pass's metadata, if the host built it.
        """
        if self._is_self_contained(shape):
            # These graphs hold all later passes, and prepare their inputs too.
            self._replay(shape, plan.layout.num_passes)
            return
        passes = range(1, plan.layout.num_passes)
        # A GPU's backends promise it for metadata that graphs were captured with.
        if self.supports_decode_metadata_update and self.device.type == "cpu":
            self._prepare_eplb_forward(shape.num_unpadded_tokens)
            groups = chain.from_iterable(self.attn_groups)
            slots = self.buffers.batch.slot_mappings[:, : shape.num_unpadded_tokens]
            width = plan.layout.num_follow_slots
            metadata = of_later_passes(first, groups, slots, width)
            self.run_passes(plan, passes, self._context(batch, shape, metadata))
            return
        for draft_pass in passes:
            self.prepare_later(plan, draft_pass, batch.num_reqs, shape.num_tokens)
            self._run(plan, draft_pass, batch, shape)

    def _prepare_first(
        self,
        plan: DraftPlan,
        verified: VerifiedBatch,
        hidden: HiddenRows | None,
        shape: DraftShape,
    ) -> None:
        prepare_inputs(
            verified,
            plan.layout,
            self.buffers,
            self.block_tables.target,
            # Even if the step drafts nothing, the next token has a slot.
            num_samples=max(plan.num_samples(0), 1),
            num_padded_tokens=shape.num_tokens,
            limit=self.limit,
            mask_token_id=self.drafter.mask_token_id,
            vocab_size=self.vocab_size,
            hidden=hidden,
        )
        self.block_tables.show(self.buffers.batch, is_first=True)

    def prepare_later(
        self, plan: DraftPlan, draft_pass: int, num_reqs: int, num_tokens: int
    ) -> None:
        """Prepares the inputs of a later pass, padded to `num_tokens` rows."""
        feedback, hidden = self.buffers.feedback, None
        if feedback is not None:
            rows = feedback[: num_reqs * plan.layout.parallel_width]
            hidden = self.drafter.fed_back(rows)
        prepare_inputs(
            PreviousPass(self.draft_tokens[:num_reqs], draft_pass),
            plan.layout,
            self.buffers,
            self.block_tables.target,
            num_samples=plan.num_samples(draft_pass),
            num_padded_tokens=num_tokens,
            limit=self.limit,
            mask_token_id=self.drafter.mask_token_id,
            vocab_size=self.vocab_size,
            hidden=hidden,
        )
        self.block_tables.show(self.buffers.batch, is_first=False)

    def _is_self_contained(self, shape: DraftShape) -> bool:
        """Whether a graph can be replayed without host-built attention metadata."""
        return shape.is_full and self.supports_decode_metadata_update

    def _replay(self, shape: DraftShape, end_pass: int) -> None:
        self._prepare_eplb_forward(shape.num_unpadded_tokens)
        for groups in self.attn_groups:
            for group in groups:
                tables = self.block_tables.input_block_tables
                group.map_to_kernel_block_table(tables[group.kv_cache_group_id])
        self.graphs.run_until(shape.graph, end_pass)

    def _run(
        self, plan: DraftPlan, draft_pass: int, batch: InputBatch, shape: DraftShape
    ) -> dict[str, Any]:
        """Runs one pass, with attention metadata built by the host, and returned."""
        self._prepare_eplb_forward(shape.num_unpadded_tokens)
        metadata = self._metadata(plan, draft_pass, batch, shape)
        if shape.is_full:
            self.graphs.run_pass(shape.graph, draft_pass)
        else:
            self.run_pass(plan, draft_pass, self._context(batch, shape, metadata))
        return metadata

    def _metadata(
        self, plan: DraftPlan, draft_pass: int, batch: InputBatch, shape: DraftShape
    ) -> dict[str, Any]:
        layout, num_tokens = plan.layout, shape.num_unpadded_tokens
        slots = self.buffers.batch.slot_mappings[:, : shape.num_tokens]
        return self._build_attn_metadata(
            batch.num_reqs,
            shape.graph,
            shape.query_start_loc,
            batch.seq_lens_cpu_upper_bound,
            step=layout.num_extra_slots + draft_pass * layout.parallel_width,
            slot_mappings=slots if shape.is_full else slots[:, :num_tokens],
        )

    def _context(
        self, batch: InputBatch, shape: DraftShape, metadata: dict[str, Any]
    ) -> PassContext:
        slots = self.buffers.batch.slot_mappings[:, : shape.num_tokens]
        return PassContext(
            batch.num_reqs,
            shape.num_tokens,
            metadata,
            build_slot_mappings_by_layer(slots, self.kv_cache_config),
            shape.num_tokens_across_dp,
            shape.graph.cg_mode,
        )

    def run_passes(self, plan: DraftPlan, passes: range, context: PassContext) -> None:
        """Several passes whose attention metadata is updated in place, with the inputs
        of later ones."""
        with self.entered(context):
            for draft_pass in passes:
                if draft_pass > 0:
                    sizes = context.num_reqs, context.num_tokens
                    self.prepare_later(plan, draft_pass, *sizes)
                metadata, num_reqs = context.attn_metadata, context.num_reqs
                self._update_draft_decode_metadata(metadata, num_reqs)
                self._run_and_sample(plan, draft_pass, context)

    def run_pass(self, plan: DraftPlan, draft_pass: int, context: PassContext) -> None:
        """One pass, with inputs and attention metadata as they are."""
        with self.entered(context):
            self._run_and_sample(plan, draft_pass, context)

    @contextmanager
    def entered(self, context: PassContext) -> Iterator[None]:
        """vLLM's forward context of a pass, and the drafter's ranks."""
        num_tokens = context.num_tokens
        forward_context = set_forward_context(
            context.attn_metadata,
            self.vllm_config,
            num_tokens=num_tokens,
            num_tokens_across_dp=context.num_tokens_across_dp,
            cudagraph_runtime_mode=context.mode,
            slot_mapping=context.slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=num_tokens),
        )
        with self.drafter.ranks(), forward_context:
            yield

    def _run_and_sample(
        self, plan: DraftPlan, draft_pass: int, context: PassContext
    ) -> None:
        """Forward, sample, keep hidden states for the next pass."""
        is_first, n = draft_pass == 0, context.num_reqs
        self._num_reqs = n
        samples, feedback = plan.num_samples(draft_pass), self.buffers.feedback
        output, own = self.forward(context, is_first)
        if samples == 0:
            return
        rows = self._sampled_rows(output, plan, n, is_first)
        sample = sample_tree if plan.is_tree else sample_chain
        sample(self, rows[:, :samples], plan, draft_pass)
        if feedback is not None and draft_pass + 1 < plan.layout.num_passes:
            own = self.drafter.to_feed(own, self.buffers, context.num_tokens, is_first)
            rows = self._sampled_rows(own, plan, n, is_first)
            feedback[: n * plan.layout.parallel_width].view_as(rows).copy_(rows)

    def forward(
        self, context: PassContext, is_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden states to sample from, and those for the next pass."""
        num_tokens, mode = context.num_tokens, context.mode
        inputs = self.drafter.model_inputs(self.buffers, num_tokens, is_first, mode)
        if mode == CUDAGraphMode.PIECEWISE:
            output = self.graphs.run_pw_graph(self.model, inputs)
        else:
            output = self.model(**inputs)
        return output if isinstance(output, tuple) else (output, output)

    def _sampled_rows(
        self, states: torch.Tensor, plan: DraftPlan, num_reqs: int, is_first: bool
    ) -> torch.Tensor:
        """[num_reqs, W, H], the rows at the sampled slots."""
        width = plan.layout.parallel_width
        if is_first:
            rows = self.buffers.batch.sample_rows[: num_reqs * width]
            return states.index_select(0, rows).view(num_reqs, width, -1)
        # In a later pass all requests have the same slots, so a view suffices.
        slots = plan.layout.num_follow_slots
        return states[: num_reqs * slots].view(num_reqs, slots, -1)[:, -width:]

    # Logits and tokens, in `drafter.vocabulary`.

    def compute_draft_logits(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        return self.drafter.vocabulary.logits(self.model, hidden_states)

    def get_draft_top_tokens(
        self, hidden_states: torch.Tensor, spec_step_idx: int
    ) -> torch.Tensor:
        return self.drafter.vocabulary.best_tokens(self.model, hidden_states)

    @cached_property
    def _logit_bytes(self) -> int:
        # vLLM finds the dtype anew each time, which takes 20 us.
        return self.vllm_config.model_config.head_dtype.itemsize

    def slices(self, num_reqs: int, samples: int) -> Iterator[slice]:
        """Requests whose logits, `samples` rows each, are computed together."""
        row = self.drafter.vocabulary.size * self._logit_bytes
        return request_slices(num_reqs, samples * row)
