# SPDX-License-Identifier: Apache-2.0
"""A drafter's context window, compared with masked attention over the whole cache."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.inputs import WindowedBlockTables

DEVICE = torch.device(current_platform.device_type)
ROOM, MAX_LEN, SIZE = 6, 640, 8
# Tokens before a request's slots, and number of slots; None: a padding row.
BATCH = [(0, 5), (33, 1), (200, 3), (632, 14), None, (47, 200), (96, 16), (95, 1)]


class Batch:
    """A draft batch, and a KV cache of random keys and values of one head."""

    def __init__(self, sizes: list[int]) -> None:
        torch.manual_seed(0)
        starts, lens = [0], []
        for request in BATCH:
            known, slots = request or (0, 0)
            starts.append(starts[-1] + slots)
            lens.append(known + slots)
        self.lens = lens
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        widths = [MAX_LEN // size for size in sizes]
        rows = len(BATCH)
        self.tables = BlockTables(sizes, rows, 1024, widths, DEVICE)
        for table, size in zip(self.tables.input_block_tables, sizes, strict=True):
            blocks = 1 + torch.randperm(table.numel(), device=DEVICE).view(table.shape)
            # There are also blocks for the tokens that later passes add.
            tokens = torch.tensor(lens, device=DEVICE)[:, None] + ROOM
            held = (tokens + size - 1) // size
            columns = torch.arange(table.shape[1], device=DEVICE)
            table.copy_(blocks * (columns < held))

    def cache(self, group: int) -> torch.Tensor:
        table = self.tables.input_block_tables[group]
        size = self.tables.block_sizes[group]
        shape = int(table.max()) + 1, size, 2, SIZE
        return torch.randn(shape, dtype=torch.float64, device=DEVICE)


def keys_and_values(cache: torch.Tensor, row: torch.Tensor, length: int):
    tokens = cache[row.long()].flatten(0, 1)
    missing = max(length - len(tokens), 0)  # padding slots past the row's end
    return F.pad(tokens, (0, 0, 0, 0, 0, missing))[:length].unbind(1)


def attend(query, keys, values, mask) -> torch.Tensor:
    scores = (query @ keys.T).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ values


def visible(known: int, slots: int, window: int, unit: int) -> torch.Tensor:
    """[slots, known + slots], the definition: visible are the first unit (the sink) and
    the first slot's window, extended to the start of a unit."""
    key = torch.arange(known + slots, device=DEVICE)
    own = known + torch.arange(slots, device=DEVICE)
    begin = max(known + 1 - window, 0) // unit * unit
    return (key <= own[:, None]) & ((key < unit) | (key >= begin))


@pytest.mark.parametrize("window", [1, 16, 40, 64, 300, MAX_LEN])
@pytest.mark.parametrize("sizes", [[16], [32], [16, 64]])
def test_attention_over_window(sizes: list[int], window: int):
    batch, unit = Batch(sizes), max(sizes)
    before = [table.clone() for table in batch.tables.input_block_tables]
    groups = range(len(sizes))
    tables = WindowedBlockTables(batch.tables, ROOM, groups, window)
    assert tables.fit(len(BATCH), MAX_LEN)
    tables.update_for_pass(batch, is_first=True)
    lens = batch.seq_lens.tolist()
    for group in groups:
        assert torch.equal(batch.tables.input_block_tables[group], before[group])
        cache = batch.cache(group)
        for req, request in enumerate(BATCH):
            if request is None:
                assert lens[req] == 0
                continue
            known, slots = request
            query = torch.randn(slots, SIZE, dtype=torch.float64, device=DEVICE)
            whole = keys_and_values(cache, before[group][req], known + slots)
            expected = attend(query, *whole, visible(known, slots, window, unit))
            row = tables.input_block_tables[group][req]
            shown = keys_and_values(cache, row, lens[req])
            # Attention only gets lengths: the last query is aligned to the last key.
            aligned = visible(lens[req] - slots, slots, MAX_LEN, unit)
            found = attend(query, *shown, aligned)
            # Padding slots past the row's end have no keys.
            real = min(MAX_LEN - known, slots)
            torch.testing.assert_close(found[:real], expected[:real])
            assert lens[req] <= known + slots
            assert lens[req] < window + 3 * unit + slots
    if window == MAX_LEN:
        assert lens == batch.lens


def test_later_passes_drop_the_same_blocks():
    batch = Batch([16])
    tables = WindowedBlockTables(batch.tables, ROOM, [0], 40)
    tables.update_for_pass(batch, is_first=True)
    rows, dropped = tables.input_block_tables[0].clone(), tables.dropped.clone()
    assert dropped.max() > 500 and (dropped % 16 == 0).all()
    longer = torch.tensor(batch.lens, device=DEVICE) + ROOM
    batch.seq_lens.copy_(longer)
    tables.update_for_pass(batch, is_first=False)
    assert torch.equal(batch.seq_lens, (longer - dropped).int())
    assert torch.equal(tables.input_block_tables[0], rows)
    # The window contains the tokens that later passes add, too.
    cache, source = batch.cache(0), batch.tables.input_block_tables[0]
    for req, length in enumerate(longer.tolist()):
        end = min(length, MAX_LEN)
        left_out = int(dropped[req])
        whole = keys_and_values(cache, source[req], end)
        shown = keys_and_values(cache, rows[req], end - left_out)
        for found, wanted in zip(shown, whole, strict=True):
            assert torch.equal(found[16:], wanted[16 + left_out :])
    # The next step builds new rows.
    batch.seq_lens.copy_(torch.arange(len(BATCH)))
    batch.query_start_loc.copy_(torch.arange(len(BATCH) + 1))
    tables.update_for_pass(batch, is_first=True)
    assert not tables.dropped.any()
    assert batch.seq_lens.tolist() == [*range(len(BATCH))]


def test_indivisible_block_sizes_are_refused():
    base = SimpleNamespace(
        block_sizes=[16, 48, 32],
        input_block_tables=[torch.zeros(2, 4, dtype=torch.int32)] * 3,
        device=DEVICE,
    )
    WindowedBlockTables(base, ROOM, [0, 1], 8)
    with pytest.raises(ValueError, match=r"draft_window .* blocks of \[48, 32\] token"):
        WindowedBlockTables(base, ROOM, [1, 2], 8)
