# SPDX-License-Identifier: Apache-2.0
"""Block tables of a drafter that attends to a window of its context, and to its start.

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
from vllm.v1.worker.gpu.block_table import BlockTables

from .block_tables import DraftBlockTables
from .structs import DraftBatch


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

    def show(self, batch: DraftBatch, is_first: bool) -> None:
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
