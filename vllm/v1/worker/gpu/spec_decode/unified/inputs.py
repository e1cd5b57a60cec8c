# SPDX-License-Identifier: Apache-2.0
"""Every tensor that a draft pass reads, at fixed addresses, and how it is written.

Block tables may be those of a drafter that attends to a window of its context, and to
its start.

Keys contain their positions (RoPE), so blocks can be left out of a row of the block
table, and no attention kernel has to know. A draft step keeps the first block of a
sequence, the attention sink (arXiv 2309.17453), and all blocks from the one that holds
the token `window` - 1 before its first slot:

    row of the cache    b0 b1 b2 b3 b4 b5    22 tokens in blocks of 4, slots from 20 on
    window 6            b0 .. .. b3 b4 b5    tokens from 15 on, and the rest of b3
    row of the drafter  b0 b3 b4 b5          14 tokens

So a slot attends to at least `window` tokens, itself included. All slots of a step,
those of later passes included, share one window.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_type_hints

import torch

from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables

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

# Name, dtype and size of each tensor of a draft batch.
_TENSORS: dict[str, tuple[torch.dtype, Size]] = {
    name: hint.__metadata__
    for name, hint in get_type_hints(DraftBatch, include_extras=True).items()
    if hint is not int
}


class DraftBlockTables:
    """The target's block tables, with wider rows for padding slots if needed.

    A draft batch counts its padding slots in `seq_lens`. In the last steps before
    `max_model_len` attention may therefore read past the end of a row: only blocks of
    padding, but the entries must exist. Rows are copied to wider ones for those steps.

    Attributes:
        target: the target's block tables, which the input kernel reads.
        input_block_tables: G x [R, blocks] int32, the rows that attention reads.
    """

    def __init__(self, target: BlockTables, room: int, groups: Sequence[int]):
        """
        Args:
            target: the target's; its blocks are shared.
            room: positions past the longest sequence that padding may have.
            groups: KV groups of the drafter's layers; the target may have others, whose
                rows may hold only a few tokens of any sequence.
        """
        self.target, self.room = target, room
        self.input_block_tables = self.narrow = target.input_block_tables
        self.wide = [
            _with_room(table, size, room)
            for table, size in zip(self.narrow, target.block_sizes, strict=True)
        ]
        # Tokens of a sequence that the drafter's narrow rows hold.
        sizes = target.block_sizes
        self.capacity = min(self.narrow[g].shape[1] * sizes[g] for g in groups)

    @property
    def cp_size(self) -> int:
        return self.target.cp_size

    def fit(self, num_reqs: int, longest: int) -> bool:
        """Chooses rows for a batch whose longest target sequence is `longest`.

        Returns:
            Whether they are the rows that CUDA graphs were captured with.
        """
        self.input_block_tables = self.narrow
        if longest + self.room <= self.capacity:
            return True
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            wide[:num_reqs, : narrow.shape[1]].copy_(narrow[:num_reqs])
        self.input_block_tables = self.wide
        return False

    def update_for_pass(self, batch: DraftBatch, is_first: bool) -> None:
        """Called once the inputs of a pass are written; attention sees all of them."""


def _with_room(table: torch.Tensor, block_size: int, room: int) -> torch.Tensor:
    """Rows for `room` more tokens, filled with 0, the null block.

    They have the width that vLLM gives rows of that many tokens: kernels with another
    block size than the cache's read all of it.
    """
    blocks = cdiv(table.shape[1] * block_size + room, block_size)
    return table.new_zeros(len(table), get_block_table_width(blocks, block_size))


class WindowedBlockTables(DraftBlockTables):
    """Separate rows at fixed addresses, rebuilt in each step.

    Attributes:
        dropped: [R] int32, tokens of each request that the step leaves out.
    """

    def __init__(
        self, target: BlockTables, room: int, groups: Sequence[int], window: int
    ):
        """
        Args:
            window: the fewest tokens that a slot attends to, if there are as many.

        Raises:
            ValueError: a block size of the drafter's layers does not divide the largest
                one, so tokens cannot be left out in whole blocks.
        """
        super().__init__(target, room, groups)
        self.groups, self.window = groups, window
        self.input_block_tables = self.wide
        sizes = [target.block_sizes[group] for group in groups]
        self.unit = max(sizes)
        if any(self.unit % size for size in sizes):
            raise ValueError(
                f"draft_window does not support layers with blocks of {sizes} tokens: "
                "set block_size, or unset draft_window."
            )
        rows = len(target.input_block_tables[0])
        self.dropped = torch.zeros(rows, dtype=torch.int32, device=target.device)

    def fit(self, num_reqs: int, longest: int) -> bool:
        """Always True: the same rows are used for all batches, and are wide enough."""
        return True

    def update_for_pass(self, batch: DraftBatch, is_first: bool) -> None:
        """Builds the rows that a prepared pass attends to, and shortens `seq_lens`.

        Only the first pass of a step builds rows: those of kernels with smaller blocks
        are derived from them once per step, outside of graphs.
        """
        if is_first:
            for group in self.groups:
                rows, shown = self.narrow[group], self.wide[group]
                _window_kernel[(len(self.dropped),)](
                    batch.query_start_loc,
                    batch.seq_lens,
                    self.dropped,
                    rows,
                    rows.stride(0),
                    rows.shape[1],
                    shown,
                    shown.stride(0),
                    shown.shape[1],
                    self.window,
                    self.unit,
                    self.room,
                    self.target.block_sizes[group],
                    BLOCK=256,
                )
        batch.seq_lens.sub_(self.dropped)


@triton.jit
def _window_kernel(
    query_start_loc,  # [R + 1] int32
    seq_lens,  # [R] int32
    dropped,  # [R] int32
    rows,  # [R, num_columns] int32
    rows_stride,
    num_columns,
    shown,  # [R, num_shown_columns] int32
    shown_stride,
    num_shown_columns,
    window,
    unit,  # tokens kept at the start; a multiple of it is left out
    room,  # tokens that later passes may add
    block_size,  # of which the unit is a multiple
    BLOCK: tl.constexpr,
):
    """Program r builds the row of request r; a padded request has no tokens."""
    req = tl.program_id(0)
    length = tl.load(seq_lens + req)
    begin = tl.load(query_start_loc + req)
    first = length - (tl.load(query_start_loc + req + 1) - begin)
    before_window = tl.maximum(first + 1 - window, 0)
    left_out = tl.maximum(before_window // unit - 1, 0) * unit
    tl.store(dropped + req, left_out)
    count = (length - left_out + room + block_size - 1) // block_size
    for i in range(0, count, BLOCK):
        column = i + tl.arange(0, BLOCK)
        skipped = tl.where(column < unit // block_size, 0, left_out // block_size)
        inside = (column < count) & (column < num_shown_columns)
        at = column + skipped
        # Past the end of a row there is only padding.
        mask = inside & (at < num_columns)
        block = tl.load(rows + req.to(tl.int64) * rows_stride + at, mask=mask, other=0)
        tl.store(shown + req.to(tl.int64) * shown_stride + column, block, mask=inside)


class PreviousPass(NamedTuple):
    """What a later pass continues from, besides the buffers; see `PreviousDrafts`."""

    draft_tokens: torch.Tensor  # [n, K] int64, the drafts so far, or of beams [n, B]
    draft_pass: int  # the pass to prepare, from 1 on (0 is the first pass)
    parents: torch.Tensor | None = None  # [n, B] int32, of beams


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
        # Later passes: [R * W * B, H], the drafter's output at the sampled slots of the
        # previous pass, and [R * (2W - 1) * B, H], the same distributed to the slots.
        self.feedback: torch.Tensor | None = None
        self.own_rows: torch.Tensor | None = None
        # By name, [largest piecewise graph, ...], the inputs of piecewise graphs.
        self.lasting: dict[str, torch.Tensor] = {}
        # For the first pass: multimodal embeddings and their rows, [rows] int64 on the
        # CPU; None if there are none.
        self.multimodal: tuple[list[torch.Tensor], torch.Tensor] | None = None
        if hidden_size is not None and layout.num_passes > 1:
            counts = layout.num_follow_samples, layout.num_follow_slots
            self.feedback, self.own_rows = (
                torch.zeros(max_num_reqs * n, hidden_size, dtype=dtype, device=device)
                for n in counts
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
        previous: PreviousPass,
        plan: DraftPlan,
        num_tokens: int,
        feed: Callable[[torch.Tensor], HiddenRows | None],
    ) -> None:
        """Writes a later pass: drafts of the one before, masks.

        Args:
            num_tokens: rows of the pass, padding included.
            feed: makes of `feedback` rows what the drafter takes.
        """
        layout, draft_pass = plan.layout, previous.draft_pass
        hidden = None
        if self.feedback is not None:
            is_second = draft_pass == 1
            fed = layout.parallel_width if is_second else layout.num_follow_samples
            hidden = feed(self.feedback[: len(previous.draft_tokens) * fed])
        samples = plan.num_samples(draft_pass)
        self.prepare(previous, layout, samples, num_tokens, hidden)
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
            BEAMS=1 if is_first else layout.num_beams,
        )
        if not is_first:
            assert source.draft_pass > 0 and source.draft_tokens.stride(1) == 1
            drafts = source.draft_tokens
            source = PreviousDrafts(drafts, drafts.stride(0), source.parents)
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
