# SPDX-License-Identifier: Apache-2.0
"""One launch from the verified batch, or from the pass before, to the draft batch.

`layout.py` says which slots there are; `reference.py` is the same function in plain
PyTorch and the specification of the kernel; `native.py` is its twin in C++, which runs
instead of it on a CPU.
"""

import ctypes
from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import _load_ptr

from . import native as native_kernel
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
    last_sampled: torch.Tensor  # [R] or [R, 1] int64, by request state
    next_prefill_tokens: torch.Tensor  # [R] int32, by request state
    temperature: torch.Tensor  # [R] float32, by request state
    seeds: torch.Tensor  # [R] int64, by request state


class PreviousPass(NamedTuple):
    """What a later pass goes on from, beside the buffers."""

    draft_tokens: torch.Tensor  # [n, K] int64, the drafts so far
    draft_pass: int  # the pass to prepare; the first is 0, so from 1 on


class HiddenRows(NamedTuple):
    """Where the draft batch's hidden states come from.

    Sources stand side by side in a row of the draft batch, S * H wide.
    """

    # S x [num_tokens, H], the target's rows, or one [n * W, H], the drafter's own at
    # the slots that the pass before sampled.
    sources: tuple[torch.Tensor, ...]
    # Rows for the slots that no source has one for. With token_shift 1: [S * H], for
    # masks. With token_shift 0: [blocks, S * H], by KV block, the state of the block's
    # last token, for slot 0; that of the null block is for position 0.
    stand_ins: torch.Tensor
    kv_group: int = 0  # the KV group that the blocks are of


class _Drafts(NamedTuple):
    draft_tokens: torch.Tensor
    draft_stride: int


class _KVTables(NamedTuple):
    block_table_ptrs: torch.Tensor  # [G] uint64, to [R, max_blocks] int32
    strides: torch.Tensor  # [G] int64
    block_sizes: torch.Tensor  # [G] int32
    num_blocks: torch.Tensor  # [G, R] int32, by request state
    num_blocks_stride: int


class _Out(NamedTuple):
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mappings: torch.Tensor
    slot_mappings_stride: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    first_positions: torch.Tensor
    idx_mapping: torch.Tensor
    num_blocks: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    sample_requests: torch.Tensor
    max_num_reqs: int


class _Hidden(NamedTuple):
    stand_ins: torch.Tensor
    kv_group: int
    out: torch.Tensor


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
def _num_blocks(tables, out, req, state, group, IS_FIRST: tl.constexpr):
    """KV blocks that a request holds; a dummy request holds none.

    The engine's counts are at another address each step. Later passes, which a graph
    replays, read the copy that the first pass makes.
    """
    if IS_FIRST:
        held = tables.num_blocks + group * tables.num_blocks_stride + state
    else:
        held = out.num_blocks + group * out.max_num_reqs + req
    return tl.load(held, mask=state >= 0, other=0)


@triton.jit
def _block_before(tables, hidden, state, start):
    """KV block that the token before a request's slots ends; 0 at position 0.

    Also whether slot 0 is to be laid out: where that token ends no block, the step
    before has done so.
    """
    group = hidden.kv_group
    size = tl.load(tables.block_sizes + group)
    block = start // size - 1
    held = tables.num_blocks + group * tables.num_blocks_stride + state
    held = tl.load(held, mask=state >= 0, other=0)
    table = _load_ptr(tables.block_table_ptrs + group, tl.int32)
    table += state * tl.load(tables.strides + group)
    is_held = (block >= 0) & (block < held)
    block_id = tl.load(table + block, mask=is_held, other=0)
    return block_id.to(tl.int64), start % size == 0


@triton.jit
def _store_slots(
    tables,
    out,
    req,
    state,
    row,
    position,
    in_batch,
    live,
    GROUPS: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """KV slots of a block of rows; PAD wherever the request owns no block."""
    for group in tl.static_range(GROUPS):
        size = tl.load(tables.block_sizes + group)
        block = position // size
        held = _num_blocks(tables, out, req, state, group, IS_FIRST)
        owned = live & (block < held)
        table = _load_ptr(tables.block_table_ptrs + group, tl.int32)
        table += state * tl.load(tables.strides + group)
        block_id = tl.load(table + block, mask=owned, other=0).to(tl.int64)
        # Block 0 is the null block, which stands for blocks given back.
        slot = tl.where(block_id > 0, block_id * size + position % size, _PAD_SLOT)
        to = out.slot_mappings + group * out.slot_mappings_stride + row
        tl.store(to, slot, mask=in_batch)


@triton.jit
def _store_request(src, tables, out, req, state, origin, GROUPS: tl.constexpr):
    """What later passes and sampling read of a request, at a lasting address."""
    tl.store(out.first_positions + req, origin)
    tl.store(out.idx_mapping + req, state)
    for group in tl.static_range(GROUPS):
        held = _num_blocks(tables, out, req, state, group, True)
        tl.store(out.num_blocks + group * out.max_num_reqs + req, held)
    if state >= 0:
        tl.store(out.temperature + state, tl.load(src.temperature + state))
        tl.store(out.seeds + state, tl.load(src.seeds + state))


@triton.jit
def _store_samples(
    out,
    req,
    state,
    first,
    start,
    sampled,
    num_samples,
    limit,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The sampled slots of a request, from slot `sampled` on."""
    draft = tl.arange(0, BLOCK_W)
    inside, slot, to = draft < WIDTH, sampled + draft, req * WIDTH + draft
    is_sampled = (draft < num_samples) & (start + slot < limit)
    tl.store(out.sample_rows + to, first + slot, mask=inside)
    tl.store(out.sample_positions + to, start + slot + SHIFT, mask=inside)
    tl.store(out.sample_requests + to, tl.where(is_sampled, state, -1), mask=inside)


@triton.jit
def _store_tails(
    out, req, end, num_padded_tokens, WIDTH: tl.constexpr, GROUPS: tl.constexpr
):
    """Pads what lies behind the last request, as a replayed graph reads it."""
    BLOCK: tl.constexpr = 256
    lane = tl.arange(0, BLOCK)
    for i in range(req + 1, out.max_num_reqs, BLOCK):
        behind = i + lane < out.max_num_reqs
        tl.store(out.query_start_loc + 1 + i + lane, end, mask=behind)
        tl.store(out.seq_lens + i + lane, 0, mask=behind)
        tl.store(out.first_positions + i + lane, -1, mask=behind)
        tl.store(out.idx_mapping + i + lane, -1, mask=behind)
    for i in range((req + 1) * WIDTH, out.max_num_reqs * WIDTH, BLOCK):
        behind = i + lane < out.max_num_reqs * WIDTH
        tl.store(out.sample_rows + i + lane, 0, mask=behind)
        tl.store(out.sample_positions + i + lane, 0, mask=behind)
        tl.store(out.sample_requests + i + lane, -1, mask=behind)
    for i in range(end, num_padded_tokens, BLOCK):
        behind = i + lane < num_padded_tokens
        tl.store(out.input_ids + i + lane, 0, mask=behind)
        tl.store(out.positions + i + lane, 0, mask=behind)
        for group in tl.static_range(GROUPS):
            slots = out.slot_mappings + group * out.slot_mappings_stride
            tl.store(slots + i + lane, _PAD_SLOT, mask=behind)


@triton.jit
def _store_hidden(
    sources,
    hidden,
    row,
    source_row,
    stand_in,  # row of the stand-ins for those that have no source's, a number
    is_stood_in,
    live,
    chunk,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A chunk of columns of a block of rows: copied, or the stand-in's."""
    CHUNKS: tl.constexpr = (SIZE + BLOCK_H - 1) // BLOCK_H
    which = chunk // CHUNKS
    col = chunk % CHUNKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = col < SIZE
    other = hidden.stand_ins + (stand_in * SOURCES + which) * SIZE
    other = tl.load(other + col, mask=inside, other=0)
    at = source_row.to(tl.int64)[:, None] * SIZE + col[None, :]
    copied = (live & ~is_stood_in)[:, None] & inside[None, :]
    value = tl.broadcast_to(other[None, :], (is_stood_in.shape[0], BLOCK_H))
    for s in tl.static_range(SOURCES):
        value = tl.load(sources[s] + at, mask=copied & (which == s), other=value)
    to = (row.to(tl.int64)[:, None] * SOURCES + which) * SIZE + col[None, :]
    tl.store(hidden.out + to, value, mask=live[:, None] & inside[None, :])


# Numbers that vary while serving are not specialised: each would compile again.
@triton.jit(
    do_not_specialize=[
        "draft_pass",
        "num_samples",
        "num_padded_tokens",
        "limit",
        "mask_token_id",
    ]
)
def _prepare_inputs_kernel(
    src,  # VerifiedBatch or _Drafts
    tables,  # _KVTables
    out,  # _Out
    sources,  # HiddenRows.sources or ()
    hidden,  # _Hidden or None
    draft_pass,
    num_samples,  # drafts to sample in this pass, at most WIDTH
    num_padded_tokens,  # rows up to which the batch is padded
    limit,  # first position that must not be drafted
    mask_token_id,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Programs (request, block of slots, 0) lay slots out, (.., .., 1 + c) copy
    chunk c of their hidden states."""
    req, num_reqs = tl.program_id(0), tl.num_programs(0)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)

    # Where the request's slots begin, how many there are, how many hold tokens that
    # are known (`valid`), and the position of slot 0.
    if IS_FIRST:
        state = tl.load(src.idx_mapping + req)
        begin = tl.load(src.query_start_loc + req)
        end = tl.load(src.query_start_loc + req + 1)
        if begin == end:
            return  # padding; the last real request pads for all behind it
        last = tl.load(src.query_start_loc + tl.minimum(req + 2, num_reqs)) == end
        valid = end - begin - tl.load(src.num_rejected + req)
        first = begin + req * (WIDTH - SHIFT)
        count = end - begin + WIDTH - SHIFT
        start = tl.load(src.positions + begin)
        source = begin - 1
    else:
        origin = tl.load(out.first_positions + req)
        if origin < 0:
            return
        state = tl.load(out.idx_mapping + req)
        behind = tl.minimum(req + 1, num_reqs - 1)
        last = (behind == req) | (tl.load(out.first_positions + behind) < 0)
        valid = WIDTH - 1 + SHIFT
        first = req * (2 * WIDTH - 1)
        count = 2 * WIDTH - 1
        start = origin + (draft_pass - 1) * WIDTH + 1
        source = req * WIDTH - SHIFT
    if tl.program_id(1) * BLOCK >= count:
        return  # beside a long prompt a decoding request has few slots

    at = slot + SHIFT  # index of the slot's token in the request
    in_batch = slot < count
    position = start + slot
    live = in_batch & (at < valid + num_samples) & (position < limit)
    is_mask = at > valid
    stand_in, is_stood_in = 0, is_mask
    if SOURCES > 0 and SHIFT == 0:
        is_stood_in = slot < 0
        if IS_FIRST:
            is_stood_in = slot == 0
            stand_in, is_new = _block_before(tables, hidden, state, start)
            live &= is_new | ~is_stood_in
    row = first + slot
    chunk = tl.program_id(2) - 1
    if chunk >= 0:
        if SOURCES > 0:
            source_row = source + tl.minimum(at, valid)
            _store_hidden(
                sources, hidden, row, source_row, stand_in, is_stood_in, live, chunk,
                SOURCES, SIZE, BLOCK_H,
            )  # fmt: skip
        return

    if IS_FIRST:
        token = _verified_token(src, begin, state, valid, at)
    else:
        drafts = src.draft_tokens + req * src.draft_stride + (draft_pass - 1) * WIDTH
        token = tl.load(drafts + slot, mask=slot < WIDTH, other=0).to(tl.int32)
    token = tl.where(is_mask, mask_token_id, token)
    tl.store(out.input_ids + row, tl.where(live, token, 0), mask=in_batch)
    tl.store(out.positions + row, tl.where(live, position, 0), mask=in_batch)
    _store_slots(
        tables, out, req, state, row, position, in_batch, live, GROUPS, IS_FIRST
    )
    if tl.program_id(1) > 0:
        return

    _store_samples(
        out, req, state, first, start, valid - SHIFT, num_samples, limit,
        SHIFT, WIDTH, BLOCK_W,
    )  # fmt: skip
    tl.store(out.query_start_loc + req, first)
    tl.store(out.query_start_loc + req + 1, first + count)
    # Padding slots count too: the last query is the last key, so that causal
    # attention gives every valid slot exactly the keys before it.
    tl.store(out.seq_lens + req, (start + count).to(tl.int32))
    if IS_FIRST:
        _store_request(src, tables, out, req, state, start + valid - SHIFT, GROUPS)
    if last:
        _store_tails(out, req, first + count, num_padded_tokens, WIDTH, GROUPS)


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
    native: bool = True,
) -> None:
    """Writes the next draft batch into `buffers`, in one launch.

    Args:
        source: the verified batch for the first pass, else the pass before.
        layout: the mode's slots.
        buffers: where the draft batch goes.
        block_tables: the block tables of the target and the drafter.
        num_samples: drafts that this pass is to sample, from 1 to the layout's width.
        num_padded_tokens: rows up to which the batch is padded, at least its own.
        limit: first position that must be neither drafted nor written.
        max_query_len: most target tokens of a request; ignored in later passes.
        mask_token_id: what mask slots hold.
        hidden: the hidden states to feed; None for a drafter that takes none.
        native: run the C++ twin if tensors are on a CPU and it was built.
    """
    is_first = isinstance(source, VerifiedBatch)
    extra = layout.num_extra_slots
    slots = max_query_len + extra if is_first else layout.num_follow_slots
    num_reqs = (source.idx_mapping if is_first else source.draft_tokens).shape[0]
    assert 1 <= num_samples <= layout.parallel_width
    assert num_padded_tokens <= buffers.max_num_tokens
    assert buffers.slot_mappings.shape[0] == block_tables.num_kv_cache_groups
    sources = () if hidden is None else hidden.sources
    size = sources[0].shape[1] if sources else 0
    arguments = (
        source if is_first else _drafts(source),
        _kv_tables(block_tables),
        _out(buffers),
        sources,
        _hidden(hidden, buffers, is_first) if sources else None,
        0 if is_first else source.draft_pass,
        num_samples,
        num_padded_tokens,
        limit,
        mask_token_id,
    )
    shape = dict(
        SHIFT=layout.token_shift,
        WIDTH=layout.parallel_width,
        IS_FIRST=is_first,
        GROUPS=block_tables.num_kv_cache_groups,
        SOURCES=len(sources),
        SIZE=size,
    )
    library = native_library() if native and buffers.device.type == "cpu" else None
    if library is not None:
        return native_kernel.launch(library, num_reqs, *arguments, **shape)
    # Rows with hidden states are long: fewer of them keep more programs busy. The same
    # for every batch, lest one of another size compiles the kernel again.
    block = 16 if sources else 128
    block_h = min(triton.next_power_of_2(size), 512) if sources else 1
    chunks = len(sources) * triton.cdiv(size, block_h)
    _prepare_inputs_kernel[(num_reqs, triton.cdiv(slots, block), 1 + chunks)](
        *arguments,
        **shape,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(layout.parallel_width),
        BLOCK_H=block_h,
    )


def native_library() -> ctypes.CDLL | None:
    """The twin of the kernel, for tensors on a CPU; None where it was not built."""
    structs = VerifiedBatch, _Drafts, _KVTables, _Out, _Hidden
    return native_kernel.load(*structs)


def _drafts(source: PreviousPass) -> _Drafts:
    assert source.draft_pass > 0 and source.draft_tokens.stride(1) == 1
    return _Drafts(source.draft_tokens, source.draft_tokens.stride(0))


def _kv_tables(tables: BlockTables) -> _KVTables:
    num_blocks = tables.num_blocks.gpu
    return _KVTables(
        tables.block_table_ptrs,
        tables.block_table_strides,
        tables.block_sizes_tensor,
        num_blocks,
        num_blocks.stride(0),
    )


def _out(buffers: DraftBuffers) -> _Out:
    return _Out(
        buffers.input_ids,
        buffers.positions,
        buffers.slot_mappings,
        buffers.slot_mappings.stride(0),
        buffers.query_start_loc,
        buffers.seq_lens,
        buffers.first_positions,
        buffers.idx_mapping,
        buffers.num_blocks,
        buffers.temperature,
        buffers.seeds,
        buffers.sample_rows,
        buffers.sample_positions,
        buffers.sample_requests,
        buffers.max_num_reqs,
    )


def _hidden(hidden: HiddenRows, buffers: DraftBuffers, is_first: bool) -> _Hidden:
    out = buffers.fed_rows(hidden.stand_ins) if is_first else buffers.own_rows
    size = sum(source.shape[1] for source in hidden.sources)
    assert all(rows.is_contiguous() for rows in (*hidden.sources, hidden.stand_ins))
    assert size == hidden.stand_ins.shape[-1] == out.shape[1]
    return _Hidden(hidden.stand_ins, hidden.kv_group, out)
