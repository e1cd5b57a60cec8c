# SPDX-License-Identifier: Apache-2.0
"""What a draft step receives, and every tensor that its passes read, at fixed
addresses.

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

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch

from .input_kernel import (
    DraftBatch,
    HiddenRows,
    KVTables,
    PreviousDrafts,
    Size,
    VerifiedBatch,
    prepare_inputs_kernel,
)
from .layout import DraftLayout, DraftPlan


class TargetStep(NamedTuple):
    """A step of the target, of n requests and T rows, after verification.

    With draft trees, `accept` reduces it to the rows of accepted paths.

    Attributes:
        batch: the target's batch.
        num_rejected: [n] int32, rows at each request's end that were not accepted.
        slot_mappings: [G, at least T] int64, KV slots by KV group.
        last_hidden: [at least T, H], the target's output.
        aux_hidden: [at least T, H] each, of the target's auxiliary layers.
        is_dummy: whether its requests have no state and no KV.
        num_sampled, and those after is_dummy: see `VerifiedBatch`.
    """

    batch: InputBatch
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor
    slot_mappings: torch.Tensor | None
    last_hidden: torch.Tensor
    aux_hidden: list[torch.Tensor] | None
    is_dummy: bool = False
    last_sampled: torch.Tensor | None = None
    next_prefill_tokens: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    rope_positions: torch.Tensor | None = None
    rope_deltas: torch.Tensor | None = None

    def verified(self) -> VerifiedBatch:
        """As the input kernel takes it. Requests of a dummy batch have no state."""
        batch, n = self.batch, self.batch.num_reqs
        states = batch.idx_mapping[:n]
        if self.is_dummy:
            states = torch.full_like(states, -1)
        tokens = batch.input_ids, batch.positions, batch.query_start_loc[: n + 1]
        same = VerifiedBatch._fields[4:]
        return VerifiedBatch(*tokens, states, *(getattr(self, name) for name in same))


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

    def __init__(
        self, target: BlockTables, room: int, most: int, groups: Sequence[int]
    ):
        """
        Args:
            target: the target's; its blocks are shared.
            room: positions past the longest sequence that padding may have.
            most: tokens of the longest sequence, with that room.
            groups: KV groups of the drafter's layers; the target may have others, whose
                rows may hold only a few tokens of any sequence.
        """
        self.target, self.room, self.groups = target, room, groups
        self.input_block_tables = self.narrow = target.input_block_tables
        self.wide = [*self.narrow]
        for group in groups:
            size = target.block_sizes[group]
            self.wide[group] = _wide_rows(self.narrow[group], cdiv(most, size), size)
        self.capacity = self.reach()

    @property
    def cp_size(self) -> int:
        return self.target.cp_size

    def reach(self) -> int:
        """Tokens of a sequence that the drafter's rows hold, as chosen by `fit`."""
        rows, sizes = self.input_block_tables, self.target.block_sizes
        return min(rows[group].shape[1] * sizes[group] for group in self.groups)

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


def _wide_rows(narrow: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """Rows for so many blocks, filled with 0, the null block.

    They are as wide as vLLM makes such rows: tables of kernels with another block size
    than the cache's are no wider. TRTLLM's kernels need them contiguous.
    """
    width = max(narrow.shape[1], get_block_table_width(blocks, block_size))
    return narrow.new_zeros(len(narrow), width)


class WindowedBlockTables(DraftBlockTables):
    """Separate rows at fixed addresses, rebuilt in each step.

    Attributes:
        dropped: [R] int32, tokens of each request that the step leaves out.
    """

    def __init__(self, *tables: Any, window: int):
        """
        Args:
            tables: as of `DraftBlockTables`.
            window: the fewest tokens that a slot attends to, if there are as many.

        Raises:
            ValueError: a block size of the drafter's layers does not divide the largest
                one, so tokens cannot be left out in whole blocks.
        """
        super().__init__(*tables)
        self.window, target = window, self.target
        self.input_block_tables = self.wide
        sizes = [target.block_sizes[group] for group in self.groups]
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


class DraftLimits(NamedTuple):
    """What of a drafter's tokens and positions is valid.

    Attributes:
        mask_token_id: the token of mask slots.
        vocab_size: a target may have placeholder tokens for images past it; the drafter
            gets token 0 for them.
        max_len: first position that must be neither drafted nor written.
    """

    mask_token_id: int
    vocab_size: int
    max_len: int


class DraftInputs:
    """The draft batch, and the hidden states that a drafter is fed with it.

    H is the drafter's hidden size; other letters are those of `input_kernel.py`.
    Padding rows of hidden states keep whatever they held.

    Attributes:
        batch: what the input kernel writes, and a pass reads.
        tables: the block tables that passes read; set with the KV cache, as `limits`.
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

    def prepare(
        self,
        source: VerifiedBatch | PreviousDrafts,
        plan: DraftPlan,
        draft_pass: int,
        num_tokens: int,
        hidden: HiddenRows | None,
    ) -> None:
        """Writes the batch of a pass, in one launch.

        Args:
            source: the verified batch for the first pass: its tokens, the next token
                and masks are written. Later, the drafts of the pass before.
            draft_pass: the pass, from 0.
            num_tokens: rows of the batch, padding included.
            hidden: the hidden states to feed; None for a drafter that takes none.
        """
        layout, target = plan.layout, self.tables.target
        is_first = draft_pass == 0
        batch, fed, sources, size = self.batch, None, (), 0
        if hidden is not None:
            fed, sources = self._fed(hidden, layout, is_first), hidden.sources
            size, hidden = sources[0].shape[1], hidden._replace(sources=None)
        assert num_tokens <= batch.max_num_tokens
        assert batch.slot_mappings.shape[0] == target.num_kv_cache_groups
        # Rows with hidden states are long: fewer per program keep more programs busy.
        # Block sizes are the same for every batch, so that none compiles the kernel
        # again.
        block = 16 if sources else 32
        block_h = min(triton.next_power_of_2(size), 512) if sources else 1
        blocks = cdiv(batch.max_num_reqs, block) + cdiv(num_tokens, block)
        has_rope = is_first and self.rope_dims
        prepare_inputs_kernel[(blocks, 1 + len(sources) * cdiv(size, block_h))](
            source,
            _kv_tables(target),
            batch,
            sources,
            hidden,
            fed,
            draft_pass=draft_pass,
            num_reqs=len(source.idx_mapping if is_first else source.draft_tokens),
            # Even if the step drafts nothing, the next token has a slot.
            num_samples=max(plan.num_samples(draft_pass), 1),
            num_padded_tokens=num_tokens,
            limit=self.limits.max_len,
            mask_token_id=self.limits.mask_token_id,
            vocab_size=self.limits.vocab_size,
            width=layout.parallel_width,
            rope_stride=source.rope_positions.stride(0) if has_rope else 0,
            draft_stride=0 if is_first else source.draft_tokens.stride(0),
            SHIFT=layout.token_shift,
            IS_FIRST=is_first,
            GROUPS=target.num_kv_cache_groups,
            SOURCES=len(sources),
            SIZE=size,
            DIMS=self.rope_dims,
            BEAMS=1 if is_first else layout.num_beams,
            BLOCK=block,
            BLOCK_W=triton.next_power_of_2(self.width),
            BLOCK_R=triton.next_power_of_2(batch.max_num_reqs),
            BLOCK_H=block_h,
        )
        self.tables.update_for_pass(batch, is_first)

    def _fed(
        self, hidden: HiddenRows, layout: DraftLayout, is_first: bool
    ) -> torch.Tensor:
        """Where the hidden states of a pass are written."""
        assert layout.token_shift or not is_first or hidden.positions is not None
        fed = self.fed_rows(hidden.fallback) if is_first else self.own_rows
        size = sum(source.shape[1] for source in hidden.sources)
        assert all(rows.is_contiguous() for rows in (*hidden.sources, hidden.fallback))
        assert size == hidden.fallback.shape[-1] == fed.shape[1]
        return fed

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


def _kv_tables(target: BlockTables) -> KVTables:
    num_blocks = target.num_blocks.gpu
    return KVTables(
        target.block_table_ptrs,
        target.block_table_strides,
        target.block_sizes_tensor,
        num_blocks,
        num_blocks.stride(0),
    )


def rows_of_embeddings(
    mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None,
    batch: InputBatch,
    drafted: InputBatch,
    layout: DraftLayout,
) -> tuple[list[torch.Tensor], torch.Tensor] | None:
    """The target's multimodal embeddings that a head takes, and the rows for them.

    vLLM has shifted `mm_inputs` by one token, as in a head's batch: a row of the step
    is marked if the token after its own is multimodal.

    Args:
        mm_inputs: embeddings, each [any, H], and [num_tokens] bool on the CPU, True for
            the rows that they are for, in order; None for heads that take tokens only.
        batch: the target's step.
        drafted: the same, with trees reduced to their accepted paths.
        layout: of the draft batch.

    Returns:
        The embeddings, and [rows] int64 on the CPU, rows of the draft batch; None if
        the step has none.
    """
    if mm_inputs is None or not mm_inputs[0]:
        return None
    embeds, is_multimodal = mm_inputs
    # In a trimmed batch the host knows where prompts begin: after all drafts.
    n = batch.num_reqs
    starts = batch.query_start_loc_np[: n + 1]
    first = drafted.query_start_loc_np[:n] + np.arange(n) * layout.num_extra_slots
    moved_by = np.repeat(first - starts[:n], np.diff(starts))
    rows = np.flatnonzero(is_multimodal.numpy())
    return embeds, torch.from_numpy(rows + moved_by[rows])
