# SPDX-License-Identifier: Apache-2.0
"""Block table rows for padding slots that extend past the longest sequence."""

import pytest
import torch

from vllm.v1.worker.block_table import get_block_table_width
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftBlockTables

CPU = torch.device("cpu")


def width(num_tokens: int, block_size: int) -> int:
    """Row width as in vLLM, also for kernels with smaller blocks."""
    return get_block_table_width(-(-num_tokens // block_size), block_size)


def tables(max_model_len: int, sizes: list[int]) -> BlockTables:
    widths = [width(max_model_len, size) for size in sizes]
    made = BlockTables(sizes, 3, 8, widths, CPU)
    for table in made.input_block_tables:
        table.fill_(5)
    return made


@pytest.mark.parametrize("room", [1, 14, 30])
@pytest.mark.parametrize("max_model_len", [64, 127, 128, 250, 256, 1000])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
def test_wide_rows_match_width_in_vllm(block_size: int, max_model_len: int, room: int):
    base = tables(max_model_len, [block_size])
    view = DraftBlockTables(base, room, [0])
    view.fit(3, max_model_len)
    (rows,) = view.input_block_tables
    # A kernel's own table is exactly that wide.
    assert rows.shape[1] == width(max_model_len + room, block_size)


def test_only_long_sequences_need_wide_rows():
    base = tables(128, [16, 64])
    view = DraftBlockTables(base, 14, [0, 1])
    view.fit(3, 128 - 14)
    assert view.input_block_tables is base.input_block_tables
    view.fit(2, 128 - 13)
    for rows, narrow in zip(
        view.input_block_tables, base.input_block_tables, strict=True
    ):
        held = narrow.shape[1]
        assert torch.equal(rows[:2, :held], narrow[:2])
        assert rows[:, held:].eq(0).all() and rows[2].eq(0).all()
    view.fit(3, 20)
    assert view.input_block_tables is base.input_block_tables


def test_only_kv_cache_groups_of_drafter_count():
    """Another group may have a single block per sequence, whatever its length."""
    base = BlockTables([16, 8], 3, 8, [width(1024, 16), 1], CPU)
    assert DraftBlockTables(base, 14, [0]).fit(3, 500)
    assert not DraftBlockTables(base, 14, [0, 1]).fit(3, 500)
