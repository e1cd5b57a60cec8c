# SPDX-License-Identifier: Apache-2.0
"""Which tokens a drafter with a context window attends to."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.inputs import WindowedBlockTables

from .batches import DEVICE, int32

ROOM, MAX_LEN = 6, 640
# Tokens before a request's slots, and number of slots; (0, 0): a padding row.
BATCH = [(0, 5), (33, 1), (200, 3), (632, 14), (0, 0), (47, 200), (96, 16), (95, 1)]
LENS = [known + slots for known, slots in BATCH]


def batch() -> SimpleNamespace:
    slots = int32([slots for _, slots in BATCH]).cumsum(0, dtype=torch.int32)
    starts = torch.nn.functional.pad(slots, (1, 0))
    return SimpleNamespace(query_start_loc=starts, seq_lens=int32(LENS))


def block_tables(sizes: list[int]) -> BlockTables:
    """Block i of a request is 1 + i; there are also those that later passes fill."""
    widths = [MAX_LEN // size for size in sizes]
    tables = BlockTables(sizes, len(BATCH), 1024, widths, DEVICE)
    for table, size in zip(tables.input_block_tables, sizes, strict=True):
        columns = torch.arange(table.shape[1], device=DEVICE)
        table.copy_((columns + 1) * (columns * size < int32(LENS)[:, None] + ROOM))
    return tables


def seen(row: torch.Tensor, size: int, length: int) -> list[int]:
    """The tokens in a row of a block table, without those past the longest sequence."""
    tokens = (row.cpu()[:, None] - 1) * size + torch.arange(size)
    return [token for token in tokens.flatten()[:length].tolist() if token >= 0]


def wanted(known: int, length: int, window: int, unit: int) -> list[int]:
    """The definition: the first unit (the sink) and the first slot's window, extended
    to the start of a unit."""
    begin = max(known + 1 - window, 0) // unit * unit
    tokens = range(min(length, MAX_LEN))
    return [token for token in tokens if token < unit or token >= begin]


@pytest.mark.parametrize("window", [1, 16, 40, 64, 300, MAX_LEN])
@pytest.mark.parametrize("sizes", [[16], [32], [16, 64]])
def test_passes_attend_to_sink_and_window(sizes: list[int], window: int):
    """Later ones to the same, and to the tokens that passes before have added."""
    base, unit, groups = block_tables(sizes), max(sizes), range(len(sizes))
    before = [table.clone() for table in base.input_block_tables]
    tables = WindowedBlockTables(base, ROOM, MAX_LEN + ROOM, groups, window=window)
    assert tables.fit(len(BATCH), MAX_LEN)
    for added in (0, ROOM):
        of_pass = batch()
        of_pass.seq_lens += added
        tables.update_for_pass(of_pass, is_first=not added)
        lens = of_pass.seq_lens.tolist()
        for group in groups:
            for req, (known, slots) in enumerate(BATCH):
                row = tables.input_block_tables[group][req]
                length = known + slots + added
                expected = wanted(known, length, window, unit)
                assert seen(row, sizes[group], lens[req]) == expected
                assert lens[req] < window + 3 * unit + slots + added
    for table, same in zip(base.input_block_tables, before, strict=True):
        assert torch.equal(table, same)
    # The next step builds new rows.
    of_pass = batch()
    of_pass.seq_lens.copy_(torch.arange(len(BATCH)))
    of_pass.query_start_loc.copy_(torch.arange(len(BATCH) + 1))
    tables.update_for_pass(of_pass, is_first=True)
    assert not tables.dropped.any()
    assert of_pass.seq_lens.tolist() == [*range(len(BATCH))]


def test_indivisible_block_sizes_are_refused():
    base = block_tables([16, 48, 32])
    WindowedBlockTables(base, ROOM, MAX_LEN, [0, 1], window=8)
    with pytest.raises(ValueError, match=r"draft_window .* blocks of \[48, 32\] token"):
        WindowedBlockTables(base, ROOM, MAX_LEN, [1, 2], window=8)
