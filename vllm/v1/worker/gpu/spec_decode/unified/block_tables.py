# SPDX-License-Identifier: Apache-2.0
"""The block tables that a draft pass reads."""

from collections.abc import Sequence

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables

from .structs import DraftBatch


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

    def show(self, batch: DraftBatch, is_first: bool) -> None:
        """Called once the inputs of a pass are prepared; here attention sees all."""


def _with_room(table: torch.Tensor, block_size: int, room: int) -> torch.Tensor:
    """Rows for `room` more tokens, filled with 0, the null block.

    They have the width that vLLM gives rows of that many tokens: kernels with another
    block size than the cache's read all of it.
    """
    blocks = cdiv(table.shape[1] * block_size + room, block_size)
    return table.new_zeros(len(table), get_block_table_width(blocks, block_size))
