# SPDX-License-Identifier: Apache-2.0
"""The block tables that a draft pass reads, and those of a drafter that attends to
a window of its context, and to its start.

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

import torch

from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables

from .input_kernel import DraftBatch


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
