# SPDX-License-Identifier: Apache-2.0
"""Arguments of the input kernel's first pass, for requests of any lengths."""

from typing import Any

import torch

from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import HiddenRows, VerifiedBatch
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

BLOCK_SIZE, CONTEXT = 16, 512  # tokens of a KV block; positions before the step


def first_pass(
    layout: DraftLayout,
    query_lens: list[int],
    max_num_reqs: int,
    device: torch.device,
    num_sources: int = 0,
    hidden_size: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Keyword arguments of `prepare_inputs`.

    A request of K + 1 tokens or fewer has half of them rejected, a longer one, which is
    a prompt, none.

    Args:
        layout: of the mode.
        query_lens: target tokens of each request.
        max_num_reqs: the most requests of the engine.
        num_sources: hidden states of a token that are fed, side by side.
        hidden_size: of one of them.
    """
    num_tokens, num_reqs = sum(query_lens), len(query_lens)
    buffers = DraftBuffers(layout, num_tokens, max_num_reqs, device)
    buffers.allocate_kv_groups(1)
    limit = CONTEXT + max(query_lens) + layout.num_room_tokens
    tables = _make_tables(max_num_reqs, limit, num_tokens, device)
    hidden = None
    if num_sources:
        shape = num_sources, num_tokens, hidden_size
        sources = torch.randn(shape, dtype=dtype, device=device).unbind()
        hidden = _make_hidden(layout, sources, tables)
    return {
        "source": _make_batch(layout, query_lens, max_num_reqs, device),
        "layout": layout,
        "buffers": buffers,
        "block_tables": tables,
        "num_samples": layout.parallel_width,
        "num_padded_tokens": num_tokens + num_reqs * layout.num_extra_slots,
        "limit": limit,
        "hidden": hidden,
    }


def _make_hidden(
    layout: DraftLayout, sources: tuple[torch.Tensor, ...], tables: BlockTables
) -> HiddenRows:
    """What masks are fed, or what KV blocks keep of the token before the step."""
    width = sum(rows.shape[1] for rows in sources)
    if layout.token_shift:
        return HiddenRows(sources, sources[0].new_ones(width))
    kept = 2 * (1 + int(tables.num_blocks.np.sum()))
    positions = torch.full((kept,), CONTEXT - 1, device=tables.device)
    return HiddenRows(sources, sources[0].new_ones(kept, width), positions)


def _make_batch(
    layout: DraftLayout, query_lens: list[int], max_num_reqs: int, device: torch.device
) -> VerifiedBatch:
    lens = torch.tensor(query_lens, dtype=torch.int32)
    is_decode = lens <= layout.num_speculative_tokens + 1
    rejected = torch.where(is_decode, lens // 2, 0)
    positions = torch.cat([CONTEXT + torch.arange(q) for q in query_lens])
    states = torch.arange(max_num_reqs)
    batch = VerifiedBatch(
        input_ids=torch.randint(10, 1000, positions.shape, dtype=torch.int32),
        positions=positions,
        query_start_loc=torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(),
        idx_mapping=states[: len(lens)],
        num_sampled=lens - rejected,
        num_rejected=rejected,
        last_sampled=states[:, None] + 10,
        next_prefill_tokens=states.int(),
        temperature=torch.zeros(max_num_reqs),
        seeds=states,
    )
    return VerifiedBatch(*(tensor.to(device) for tensor in batch))


def _make_tables(
    max_num_reqs: int, max_model_len: int, num_tokens: int, device: torch.device
) -> BlockTables:
    width = -(-max_model_len // BLOCK_SIZE)
    tables = BlockTables([BLOCK_SIZE], max_num_reqs, num_tokens, [width], device)
    ids = torch.arange(1, max_num_reqs * width + 1, dtype=torch.int32)
    tables.block_tables[0].gpu.copy_(ids.view(max_num_reqs, width))
    tables.num_blocks.np[:] = width
    tables.num_blocks.copy_to_uva()
    return tables


def bytes_moved(
    layout: DraftLayout, num_reqs: int, query_len: int, hidden_row_bytes: int
) -> int:
    """What laying out a first pass must read and write at the least, in bytes.

    Args:
        hidden_row_bytes: all of the hidden states of one token; 0 if none are fed.
    """
    rows = num_reqs * (query_len + layout.num_extra_slots)
    samples = num_reqs * layout.parallel_width
    targets = num_reqs * query_len
    read = 4 * targets + 4 * rows  # token ids, block ids
    read += num_reqs * (8 + 8 + 3 * 4 + 8)  # positions, states, counts, next token
    written = rows * (4 + 8 + 8)  # token ids, positions, KV slots
    written += samples * 3 * 8 + num_reqs * (4 + 4)  # sampled slots, bounds, lengths
    hidden = (targets + rows) * hidden_row_bytes if hidden_row_bytes else 0
    return read + written + hidden
