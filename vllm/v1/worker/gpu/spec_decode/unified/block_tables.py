# SPDX-License-Identifier: Apache-2.0
"""The block tables as a draft pass reads them."""

from collections.abc import Sequence
from copy import copy

import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables


def with_room(
    block_tables: BlockTables, room: int, groups: Sequence[int]
) -> "DraftBlockTables":
    """A view of the target's block tables that draft slots may overhang.

    Args:
        block_tables: the target's; blocks and states stay shared.
        room: positions past the longest sequence that padding slots may stand for.
        groups: KV groups of the drafter's layers; the target may have others, some
            of which hold few tokens of however long a sequence.
    """
    view = copy(block_tables)
    view.__class__ = DraftBlockTables
    view.narrow = block_tables.input_block_tables
    view.wide = [
        torch.zeros(
            (table.shape[0], _width(table.shape[1] * size + room, size)),
            dtype=table.dtype,
            device=table.device,
        )
        for table, size in zip(view.narrow, view.block_sizes, strict=True)
    ]
    view.capacity = min(view.narrow[g].shape[1] * view.block_sizes[g] for g in groups)
    view.room = room
    return view


def _width(num_tokens: int, block_size: int) -> int:
    """Blocks of a row of so many tokens, aligned as the base aligns its own rows.

    Kernels with blocks of another size than the cache's read whole such rows.
    """
    return get_block_table_width(cdiv(num_tokens, block_size), block_size)


class DraftBlockTables(BlockTables):
    """Made by `with_room` only.

    A draft batch counts its padding slots in `seq_lens`. In the last steps before
    `max_model_len` attention may therefore look past the end of a row: at blocks of
    padding only, but a row must be there. Wider rows are copied for those steps.
    """

    narrow: list[torch.Tensor]  # G x [R, width], in batch order
    wide: list[torch.Tensor]  # G x [R, width + room], zeros (the null block) behind
    capacity: int  # tokens of a sequence that the drafter's narrow rows hold
    room: int

    def fit(self, num_reqs: int, longest: int) -> bool:
        """Chooses rows for a batch whose longest target sequence is `longest`.

        Returns:
            Whether they are the rows that CUDA graphs are recorded with.
        """
        self.input_block_tables = self.narrow
        if longest + self.room <= self.capacity:
            return True
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            wide[:num_reqs, : narrow.shape[1]].copy_(narrow[:num_reqs])
        self.input_block_tables = self.wide
        return False
