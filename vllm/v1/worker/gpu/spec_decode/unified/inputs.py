# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a draft pass reads, at fixed addresses, and how it is written."""

from collections.abc import Callable
from typing import NamedTuple, get_type_hints

import torch

from .input_kernel import (
    DraftBatch,
    FedStates,
    KVTables,
    Numbers,
    PreviousDrafts,
    Size,
    VerifiedBatch,
    launch_input_kernel,
)
from .layout import DraftLayout, DraftPlan
from .step import TargetStep
from .tables import DraftBlockTables

# Name, dtype and size of each tensor of a draft batch.
_TENSORS: dict[str, tuple[torch.dtype, Size]] = {
    name: hint.__metadata__
    for name, hint in get_type_hints(DraftBatch, include_extras=True).items()
    if hint is not int
}


class PreviousPass(NamedTuple):
    """What a later pass continues from, besides the buffers."""

    draft_tokens: torch.Tensor  # [n, K] int64, the drafts so far
    draft_pass: int  # the pass to prepare, from 1 on (0 is the first pass)


class HiddenRows(NamedTuple):
    """Where the draft batch's hidden states come from.

    The S sources are concatenated in a row of the draft batch, S * H wide.
    """

    # S x [num_tokens, H], the target's rows, or one [n * W, H], the drafter's own at
    # the slots that the previous pass sampled.
    sources: tuple[torch.Tensor, ...]
    # For slots without a source row. With token_shift 1: [S * H], for masks. With
    # token_shift 0: [2 * blocks, S * H], `KeptStates.states`, for slot 0.
    fallback: torch.Tensor
    # With token_shift 0: [2 * blocks] int64, positions of the tokens of these states,
    # and the KV group of the blocks.
    positions: torch.Tensor | None = None
    kv_group: int = 0


class DraftLimits(NamedTuple):
    """What of a drafter's tokens and positions is valid.

    Attributes:
        mask_token_id: the token of mask slots.
        vocab_size: a target may have placeholder tokens for images past it; the drafter
            gets token 0 for them.
        max_len: first position that must be neither drafted nor written. Read in each
            step: the engine may lower max_model_len to fit its KV cache.
    """

    mask_token_id: int
    vocab_size: int
    max_len: Callable[[], int]


class DraftInputs:
    """The draft batch, and the hidden states that a drafter is fed with it.

    H is the drafter's hidden size; other letters are those of `input_kernel.py`.
    Padding rows of hidden states keep whatever they held.

    Attributes:
        batch: what the input kernel writes, and a pass reads.
        tables: the block tables that passes read; set with the KV cache.
        limits: of the drafter.
    """

    tables: DraftBlockTables
    limits: DraftLimits

    def __init__(
        self,
        layout: DraftLayout,
        max_num_batched_tokens: int,
        max_num_reqs: int,
        device: torch.device,
        hidden_size: int | None = None,
        dtype: torch.dtype | None = None,
        rope_dims: int = 0,
    ):
        self.width, self.device = layout.parallel_width, device
        self.rope_dims = rope_dims
        num_tokens = layout.max_num_tokens(max_num_batched_tokens, max_num_reqs)
        self.batch = self._allocate(max_num_reqs, num_tokens, num_kv_groups=0)
        # [N, width of the target's hidden states]; allocated once that is known.
        self.fed: torch.Tensor | None = None
        # Later passes: [R * W, H], the drafter's output at the sampled slots of the
        # previous pass, and [R * (2W - 1), H], the same distributed to the slots.
        self.feedback: torch.Tensor | None = None
        self.own_rows: torch.Tensor | None = None
        # By name, [largest piecewise graph, ...], the inputs of piecewise graphs.
        self.lasting: dict[str, torch.Tensor] = {}
        # For the first pass: multimodal embeddings and their rows, [rows] int64 on the
        # CPU; None if there are none.
        self.multimodal: tuple[list[torch.Tensor], torch.Tensor] | None = None
        if hidden_size is not None and layout.num_passes > 1:
            counts = max_num_reqs * self.width, max_num_reqs * layout.num_follow_slots
            self.feedback, self.own_rows = (
                torch.zeros(rows, hidden_size, dtype=dtype, device=device)
                for rows in counts
            )

    def allocate_kv_groups(self, num_kv_groups: int) -> None:
        """Reallocates the batch, once the number of KV groups is known."""
        sizes = self.batch.max_num_reqs, self.batch.max_num_tokens
        self.batch = self._allocate(*sizes, num_kv_groups)

    def _allocate(
        self, max_num_reqs: int, max_num_tokens: int, num_kv_groups: int
    ) -> DraftBatch:
        """A draft batch that is all padding."""
        sizes = {
            "N": max_num_tokens,
            "N + 1": max_num_tokens + 1,
            "D": self.rope_dims,
            "G": num_kv_groups,
            "R": max_num_reqs,
            "R + 1": max_num_reqs + 1,
            "R * W": max_num_reqs * self.width,
        }
        tensors = {
            name: torch.full(
                [sizes[each] for each in size.shape],
                size.padding or 0,
                dtype=dtype,
                device=self.device,
            )
            for name, (dtype, size) in _TENSORS.items()
        }
        return DraftBatch(
            **tensors, max_num_reqs=max_num_reqs, max_num_tokens=max_num_tokens
        )

    def positions(self, num_tokens: int) -> torch.Tensor:
        """The draft model's positions: [num_tokens], or [D, num_tokens] of M-RoPE."""
        if self.rope_dims:
            return self.batch.rope_positions[:, :num_tokens]
        return self.batch.positions[:num_tokens]

    def fed_rows(self, like: torch.Tensor) -> torch.Tensor:
        """`fed`, allocated on the first batch, which has the target's width.

        Args:
            like: [width] or [any, width], in the dtype of the hidden states.
        """
        if self.fed is None:
            self.fed = like.new_zeros(self.batch.max_num_tokens, like.shape[-1])
        return self.fed

    def hidden_states(self, num_tokens: int, is_first: bool) -> torch.Tensor:
        """[num_tokens, ...], hidden states for the slots of a pass."""
        rows = self.fed if is_first else self.own_rows
        assert rows is not None
        return rows[:num_tokens]

    def at_lasting_address(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Copies rows to where piecewise graphs read them. The first call must have the
        most rows."""
        if name not in self.lasting:
            self.lasting[name] = torch.empty_like(rows)
        return self.lasting[name][: len(rows)].copy_(rows)

    def first(
        self,
        verified: VerifiedBatch,
        plan: DraftPlan,
        num_tokens: int,
        hidden: HiddenRows | None,
    ) -> None:
        """Writes the first pass: verified tokens, the next token, masks.

        Args:
            num_tokens: rows of the pass, padding included.
            hidden: the hidden states to feed; None for a drafter that takes none.
        """
        # Even if the step drafts nothing, the next token has a slot.
        samples = max(plan.num_samples(0), 1)
        self.prepare(verified, plan.layout, samples, num_tokens, hidden)
        self.tables.update_for_pass(self.batch, is_first=True)

    def next(
        self,
        drafts: torch.Tensor,
        plan: DraftPlan,
        draft_pass: int,
        num_tokens: int,
        feed: Callable[[torch.Tensor], HiddenRows | None],
    ) -> None:
        """Writes a later pass: drafts of the one before, masks.

        Args:
            drafts: [n, K] int64, the drafts so far.
            draft_pass: the pass to write, from 1 on.
            num_tokens: rows of the pass, padding included.
            feed: makes of `feedback` rows what the drafter takes.
        """
        hidden = None
        if self.feedback is not None:
            hidden = feed(self.feedback[: len(drafts) * plan.layout.parallel_width])
        source, samples = PreviousPass(drafts, draft_pass), plan.num_samples(draft_pass)
        self.prepare(source, plan.layout, samples, num_tokens, hidden)
        self.tables.update_for_pass(self.batch, is_first=False)

    def prepare(
        self,
        source: VerifiedBatch | PreviousPass,
        layout: DraftLayout,
        num_samples: int,
        num_tokens: int,
        hidden: HiddenRows | None,
    ) -> None:
        """Writes the next draft batch, in one launch.

        Args:
            source: the verified batch for the first pass, else the previous pass.
            layout: the mode's slots.
            num_samples: drafts that this pass is to sample, from 1 to the layout's
                width.
            num_tokens: rows of the batch, padding included.
            hidden: the hidden states to feed; None for a drafter that takes none.
        """
        is_first, target = isinstance(source, VerifiedBatch), self.tables.target
        batch, sources = self.batch, () if hidden is None else hidden.sources
        assert 1 <= num_samples <= layout.parallel_width
        assert num_tokens <= batch.max_num_tokens
        assert batch.slot_mappings.shape[0] == target.num_kv_cache_groups
        fed = None if hidden is None else self._fed_states(hidden, layout, is_first)
        has_rope = is_first and self.rope_dims
        numbers = Numbers(
            draft_pass=0 if is_first else source.draft_pass,
            num_reqs=len(source.idx_mapping if is_first else source.draft_tokens),
            num_samples=num_samples,
            num_padded_tokens=num_tokens,
            limit=self.limits.max_len(),
            mask_token_id=self.limits.mask_token_id,
            vocab_size=self.limits.vocab_size,
            width=layout.parallel_width,
            rope_stride=source.rope_positions.stride(0) if has_rope else 0,
            SHIFT=layout.token_shift,
            IS_FIRST=is_first,
            GROUPS=target.num_kv_cache_groups,
            SOURCES=len(sources),
            SIZE=sources[0].shape[1] if sources else 0,
            DIMS=self.rope_dims,
        )
        if not is_first:
            assert source.draft_pass > 0 and source.draft_tokens.stride(1) == 1
            source = PreviousDrafts(source.draft_tokens, source.draft_tokens.stride(0))
        num_blocks = target.num_blocks.gpu
        tables = KVTables(
            target.block_table_ptrs,
            target.block_table_strides,
            target.block_sizes_tensor,
            num_blocks,
            num_blocks.stride(0),
        )
        launch_input_kernel(source, tables, batch, sources, fed, numbers, self.width)

    def _fed_states(
        self, hidden: HiddenRows, layout: DraftLayout, is_first: bool
    ) -> FedStates:
        assert layout.token_shift or not is_first or hidden.positions is not None
        out = self.fed_rows(hidden.fallback) if is_first else self.own_rows
        size = sum(source.shape[1] for source in hidden.sources)
        assert all(rows.is_contiguous() for rows in (*hidden.sources, hidden.fallback))
        assert size == hidden.fallback.shape[-1] == out.shape[1]
        return FedStates(hidden.fallback, hidden.positions, hidden.kv_group, out)

    def lay_out_evenly(self, num_reqs: int, num_tokens: int) -> None:
        """Writes dummy requests that share the rows evenly, to capture a graph on."""
        self.reset()
        batch = self.batch
        starts = torch.arange(num_reqs + 1, device=self.device) * num_tokens // num_reqs
        batch.query_start_loc[: num_reqs + 1] = starts
        batch.query_start_loc[num_reqs + 1 :] = num_tokens
        batch.seq_lens[:num_reqs] = starts.diff()
        batch.first_positions[:num_reqs] = 0

    def reset(self) -> None:
        """Makes the whole batch padding, so that a pass over it changes nothing."""
        for name, (_, size) in _TENSORS.items():
            if size.padding is not None:
                getattr(self.batch, name).fill_(size.padding)


def verified_batch(step: TargetStep) -> VerifiedBatch:
    """The kernel's view of a step. Requests of a dummy batch have no state."""
    batch, requests, n = step.batch, step.requests, step.batch.num_reqs
    states = batch.idx_mapping[:n]
    return VerifiedBatch(
        batch.input_ids,
        batch.positions,
        batch.query_start_loc[: n + 1],
        torch.full_like(states, -1) if step.is_dummy else states,
        step.num_sampled,
        step.num_rejected,
        requests.last_sampled,
        requests.next_prefill_tokens,
        requests.temperature,
        requests.seeds,
        step.rope_positions,
        requests.rope_deltas,
    )
