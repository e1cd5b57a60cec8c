# SPDX-License-Identifier: Apache-2.0
"""Block table rows for padding slots that extend past the longest sequence."""

import pytest
import torch

from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftBlockTables


def width(num_tokens: int, block_size: int) -> int:
    """Row width as in vLLM, also for kernels with smaller blocks."""
    return get_block_table_width(-(-num_tokens // block_size), block_size)


def tables(sizes: list[int], widths: list[int]) -> BlockTables:
    made = BlockTables(sizes, 3, 8, widths, torch.device("cpu"))
    for table in made.input_block_tables:
        table.fill_(5)
    return made


@pytest.mark.parametrize("room", [1, 14, 30])
@pytest.mark.parametrize("longest", [64, 127, 128, 250, 256, 1000])
@pytest.mark.parametrize("size", [16, 32, 48, 128, 256])
def test_only_long_sequences_need_wide_rows(size: int, longest: int, room: int):
    """A kernel's own table has this width, and TRTLLM's take contiguous rows only."""
    base = tables([size, 1], [width(longest, size), longest])
    view = DraftBlockTables(base, room, longest + room, [0])
    narrow = (shared := base.input_block_tables)[0]
    held, most = narrow.shape[1], narrow.shape[1] * size
    assert view.fit(3, most - room) and view.input_block_tables is shared
    assert not view.fit(2, most - room + 1)
    rows = view.input_block_tables[0]
    assert rows.shape[1] == width(longest + room, size) and rows.is_contiguous()
    assert rows[:2, :held].equal(narrow[:2])
    assert rows[:, held:].eq(0).all() and rows[2].eq(0).all()
    assert view.fit(3, 20) is (20 + room <= most)


def test_only_kv_cache_groups_of_drafter_count():
    """Another group may have a single block per sequence, whatever its length."""
    base = tables([16, 8], [width(1024, 16), 1])
    assert DraftBlockTables(base, 14, 1038, [0]).fit(3, 500)
    assert not DraftBlockTables(base, 14, 1038, [0, 1]).fit(3, 500)
