# SPDX-License-Identifier: Apache-2.0
"""One launch from the verified batch, or from the pass before, to the draft batch.

`layout.py` says which slots there are; `reference.py` is the same function in plain
PyTorch and the specification of the kernel.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import _load_ptr

from .buffers import DraftBuffers
from .layout import DraftLayout

_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)


class VerifiedBatch(NamedTuple):
    """The target's batch after verification; n requests, padded ones at the end.

    A padded request has no query tokens. One whose `idx_mapping` is -1 is a dummy: it
    takes its slots, but owns no KV blocks and is not sampled.
    """

    input_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int64
    query_start_loc: torch.Tensor  # [n + 1] int32
    idx_mapping: torch.Tensor  # [n] int64, request state or -1
    num_sampled: torch.Tensor  # [n] int32, 0 while a prompt is being chunked
    num_rejected: torch.Tensor  # [n] int32
    last_sampled: torch.Tensor  # [R] or [R, 1], by request state
    next_prefill_tokens: torch.Tensor  # [R], by request state


class PreviousPass(NamedTuple):
    """What a later pass goes on from."""

    draft_tokens: torch.Tensor  # [n, K] int64, the drafts so far
    idx_mapping: torch.Tensor  # [n] int64, request state or -1
    draft_pass: int  # the pass to prepare; the first is 0, so from 1 on


class HiddenRows(NamedTuple):
    """Where the draft batch's hidden states come from."""

    # [num_tokens, H], the target's rows, or [n * W, H], the drafter's own at the
    # slots that the pass before sampled.
    rows: torch.Tensor
    mask_hidden: torch.Tensor  # [H], for mask slots


class _Drafts(NamedTuple):
    draft_tokens: torch.Tensor
    draft_stride: int
    idx_mapping: torch.Tensor
    draft_pass: int


class _KVTables(NamedTuple):
    block_table_ptrs: torch.Tensor  # [G] uint64, to [R, max_blocks] int32
    strides: torch.Tensor  # [G] int64
    block_sizes: torch.Tensor  # [G] int32
    num_blocks: torch.Tensor  # [G, R] int32
    num_blocks_stride: int


class _Out(NamedTuple):
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: torch.Tensor
    slot_mappings_stride: int
    num_padded_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    first_positions: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    sample_requests: torch.Tensor
    max_num_reqs: int


class _Hidden(NamedTuple):
    rows: torch.Tensor
    mask_hidden: torch.Tensor
    out: torch.Tensor
    size: int


@triton.jit
def _verified_token(src, begin, state, valid, at):
    """Token `at` of a request's valid tokens; at == valid is the one after them."""
    tokens = tl.load(src.input_ids + begin + at, mask=at < valid, other=0)
    return tl.where(at == valid, _next_token(src, state), tokens)


@triton.jit
def _next_token(src, state):
    req, owned = tl.program_id(0), state >= 0
    if tl.load(src.num_sampled + req) > 0:
        return tl.load(src.last_sampled + state, mask=owned, other=0).to(tl.int32)
    return tl.load(src.next_prefill_tokens + state, mask=owned, other=0).to(tl.int32)


@triton.jit
def _store_slots(
    tables, out, state, row, position, in_batch, live, GROUPS: tl.constexpr
):
    """KV slots of a block of rows; PAD wherever the request owns no block."""
    for group in tl.static_range(GROUPS):
        size = tl.load(tables.block_sizes + group)
        block = position // size
        held = tl.load(
            tables.num_blocks + group * tables.num_blocks_stride + state,
            mask=state >= 0,
            other=0,  # a dummy request owns nothing
        )
        owned = live & (block < held)
        table = _load_ptr(tables.block_table_ptrs + group, tl.int32)
        table += state * tl.load(tables.strides + group)
        block_id = tl.load(table + block, mask=owned, other=0).to(tl.int64)
        # Block 0 is the null block, which stands for blocks given back.
        slot = tl.where(block_id > 0, block_id * size + position % size, _PAD_SLOT)
        to = out.slot_mappings + group * out.slot_mappings_stride + row
        tl.store(to, slot, mask=in_batch)


@triton.jit
def _store_tails(out, req, end, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Pads what lies behind the last request, as a replayed graph reads it."""
    BLOCK: tl.constexpr = 256
    lane = tl.arange(0, BLOCK)
    for i in range(req + 1, out.max_num_reqs, BLOCK):
        behind = i + lane < out.max_num_reqs
        tl.store(out.query_start_loc + 1 + i + lane, end, mask=behind)
        tl.store(out.seq_lens + i + lane, 0, mask=behind)
        tl.store(out.first_positions + i + lane, -1, mask=behind)
    for i in range((req + 1) * WIDTH, out.max_num_reqs * WIDTH, BLOCK):
        behind = i + lane < out.max_num_reqs * WIDTH
        tl.store(out.sample_rows + i + lane, 0, mask=behind)
        tl.store(out.sample_positions + i + lane, 0, mask=behind)
        tl.store(out.sample_requests + i + lane, -1, mask=behind)
    for i in range(end, out.num_padded_tokens, BLOCK):
        behind = i + lane < out.num_padded_tokens
        tl.store(out.input_ids + i + lane, 0, mask=behind)
        tl.store(out.positions + i + lane, 0, mask=behind)
        for group in tl.static_range(GROUPS):
            slots = out.slot_mappings + group * out.slot_mappings_stride
            tl.store(slots + i + lane, _PAD_SLOT, mask=behind)


@triton.jit
def _store_hidden(hidden, row, source, is_mask, live, BLOCK_H: tl.constexpr):
    """Hidden states of a block of rows: copied, or the learned one for masks."""
    for h in range(0, hidden.size, BLOCK_H):
        col = h + tl.arange(0, BLOCK_H)
        inside = col < hidden.size
        mask_hidden = tl.load(hidden.mask_hidden + col, mask=inside)
        at = source.to(tl.int64)[:, None] * hidden.size + col[None, :]
        copied = (live & ~is_mask)[:, None] & inside[None, :]
        value = tl.load(hidden.rows + at, mask=copied)
        value = tl.where(is_mask[:, None], mask_hidden[None, :], value)
        to = row.to(tl.int64)[:, None] * hidden.size + col[None, :]
        tl.store(hidden.out + to, value, mask=live[:, None] & inside[None, :])


@triton.jit
def _prepare_inputs_kernel(
    src,  # VerifiedBatch or PreviousPass
    tables,  # _KVTables
    out,  # _Out
    hidden,  # _Hidden or None
    num_samples,  # drafts to sample in this pass, at most WIDTH
    limit,  # first position that must not be drafted
    mask_token_id,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program lays out BLOCK slots of one request."""
    req, num_reqs = tl.program_id(0), tl.num_programs(0)
    state = tl.load(src.idx_mapping + req)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

    # Where the request's slots begin, how many there are, how many hold tokens that
    # are known (`valid`), and the position of slot 0.
    if IS_FIRST:
        begin = tl.load(src.query_start_loc + req)
        end = tl.load(src.query_start_loc + req + 1)
        if begin == end:
            return  # padding; the last real request pads for all behind it
        last = tl.load(src.query_start_loc + tl.minimum(req + 2, num_reqs)) == end
        valid = end - begin - tl.load(src.num_rejected + req)
        first = begin + req * (WIDTH - SHIFT)
        count = end - begin + WIDTH - SHIFT
        start = tl.load(src.positions + begin)
        token = _verified_token(src, begin, state, valid, slot + SHIFT)
        source = begin + slot
    else:
        origin = tl.load(out.first_positions + req)
        if origin < 0:
            return
        behind = tl.minimum(req + 1, num_reqs - 1)
        last = (behind == req) | (tl.load(out.first_positions + behind) < 0)
        valid = WIDTH - 1 + SHIFT
        first = req * (2 * WIDTH - 1)
        count = 2 * WIDTH - 1
        start = origin + (src.draft_pass - 1) * WIDTH + 1
        drafts = src.draft_tokens + req * src.draft_stride
        drafts += (src.draft_pass - 1) * WIDTH
        token = tl.load(drafts + slot, mask=slot < WIDTH, other=0).to(tl.int32)
        source = req * WIDTH + slot

    at = slot + SHIFT  # index of the slot's token in the request
    in_batch = slot < count
    position = start + slot
    live = in_batch & (at < valid + num_samples) & (position < limit)
    is_mask = at > valid
    row = first + slot
    token = tl.where(is_mask, mask_token_id, token)
    tl.store(out.input_ids + row, tl.where(live, token, 0), mask=in_batch)
    tl.store(out.positions + row, tl.where(live, position, 0), mask=in_batch)
    _store_slots(tables, out, state, row, position, in_batch, live, GROUPS)
    if hidden is not None:
        _store_hidden(hidden, row, source, is_mask, live, BLOCK_H)
    if tl.program_id(1) > 0:
        return

    draft = tl.arange(0, BLOCK_W)
    sampled = valid - SHIFT + draft
    is_sampled = (draft < num_samples) & (start + sampled < limit)
    to = req * WIDTH + draft
    tl.store(out.sample_rows + to, first + sampled, mask=draft < WIDTH)
    key = start + sampled + SHIFT
    tl.store(out.sample_positions + to, key, mask=draft < WIDTH)
    tl.store(out.sample_requests + to, tl.where(is_sampled, state, -1), draft < WIDTH)
    tl.store(out.query_start_loc + req, first)
    tl.store(out.query_start_loc + req + 1, first + count)
    # Padding slots count too: the last query is the last key, so that causal
    # attention gives every valid slot exactly the keys before it.
    tl.store(out.seq_lens + req, (start + count).to(tl.int32))
    if IS_FIRST:
        tl.store(out.first_positions + req, start + valid - SHIFT)
    if last:
        _store_tails(out, req, first + count, WIDTH, GROUPS)


def prepare_inputs(
    source: VerifiedBatch | PreviousPass,
    layout: DraftLayout,
    buffers: DraftBuffers,
    block_tables: BlockTables,
    *,
    num_samples: int,
    num_padded_tokens: int,
    limit: int,
    max_query_len: int,
    mask_token_id: int = 0,
    hidden: HiddenRows | None = None,
) -> None:
    """Writes the next draft batch into `buffers`, in one launch.

    Args:
        source: the verified batch for the first pass, else the pass before.
        layout: the mode's slots.
        buffers: where the draft batch goes.
        block_tables: the block tables of the target and the drafter.
        num_samples: drafts that this pass is to sample, at most the layout's width.
        num_padded_tokens: rows up to which the batch is padded, at least its own.
        limit: first position that must be neither drafted nor written.
        max_query_len: most target tokens of a request; ignored in later passes.
        mask_token_id: what mask slots hold.
        hidden: the hidden states to feed; None for a drafter that takes none.
    """
    is_first = isinstance(source, VerifiedBatch)
    extra = layout.num_extra_slots
    slots = max_query_len + extra if is_first else layout.num_follow_slots
    num_reqs = source.idx_mapping.shape[0]
    assert num_samples <= layout.parallel_width
    assert num_padded_tokens <= buffers.max_num_tokens
    assert buffers.slot_mappings.shape[0] == block_tables.num_kv_cache_groups
    # Rows with hidden states are long: fewer of them keep more programs busy.
    block = min(triton.next_power_of_2(slots), 128 if hidden is None else 16)
    hidden_size = 0 if hidden is None else hidden.rows.shape[1]
    _prepare_inputs_kernel[(num_reqs, triton.cdiv(slots, block))](
        source if is_first else _drafts(source),
        _kv_tables(block_tables),
        _out(buffers, num_padded_tokens),
        None if hidden is None else _hidden(hidden, buffers),
        num_samples,
        limit,
        mask_token_id,
        SHIFT=layout.token_shift,
        WIDTH=layout.parallel_width,
        IS_FIRST=is_first,
        GROUPS=block_tables.num_kv_cache_groups,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(layout.parallel_width),
        BLOCK_H=min(triton.next_power_of_2(hidden_size), 1024),
    )


def _drafts(source: PreviousPass) -> _Drafts:
    assert source.draft_pass > 0 and source.draft_tokens.stride(1) == 1
    stride = source.draft_tokens.stride(0)
    return _Drafts(source.draft_tokens, stride, source.idx_mapping, source.draft_pass)


def _kv_tables(tables: BlockTables) -> _KVTables:
    num_blocks = tables.num_blocks.gpu
    return _KVTables(
        tables.block_table_ptrs,
        tables.block_table_strides,
        tables.block_sizes_tensor,
        num_blocks,
        num_blocks.stride(0),
    )


def _out(buffers: DraftBuffers, num_padded_tokens: int) -> _Out:
    return _Out(
        buffers.input_ids,
        buffers.positions,
        buffers.slot_mappings,
        buffers.slot_mappings.stride(0),
        num_padded_tokens,
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.first_positions,
        buffers.sample_rows,
        buffers.sample_positions,
        buffers.sample_requests,
        buffers.max_num_reqs,
    )


def _hidden(hidden: HiddenRows, buffers: DraftBuffers) -> _Hidden:
    out = buffers.hidden_states
    assert out is not None and hidden.rows.is_contiguous()
    assert hidden.rows.shape[1] == hidden.mask_hidden.numel() == out.shape[1]
    return _Hidden(hidden.rows, hidden.mask_hidden, out, out.shape[1])
