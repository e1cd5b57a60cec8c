# SPDX-License-Identifier: Apache-2.0
"""One launch from the verified batch, or from the pass before, to the draft batch.

`layout.py` says which slots there are, `structs.py` what the kernel takes and writes.
`prepare_inputs_reference.py` among the tests is the same function in plain PyTorch, and
its specification; `native.py` runs an implementation in C++ on a CPU.
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
from .structs import FedStates, KVTables, Numbers, PreviousDrafts, VerifiedBatch

_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)


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
    fallback: torch.Tensor
    kv_group: int = 0  # the KV group that the blocks are of


@triton.jit
def _verified_row(begin, at):
    """Row of the verified batch that holds token `at` of a request's valid tokens."""
    return begin + at


@triton.jit
def _verified_token(src, begin, state, valid, at):
    """Token `at` of a request's valid tokens; at == valid is the one after them."""
    row = _verified_row(begin, at)
    tokens = tl.load(src.input_ids + row, mask=at < valid, other=0)
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
    table = _load_ptr(tables.block_tables + group, tl.int32)
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
        table = _load_ptr(tables.block_tables + group, tl.int32)
        table += state * tl.load(tables.strides + group)
        block_id = tl.load(table + block, mask=owned, other=0).to(tl.int64)
        # Block 0 is the null block, which stands for blocks given back.
        slot = tl.where(block_id > 0, block_id * size + position % size, _PAD_SLOT)
        to = out.slot_mappings + group * out.max_num_tokens + row
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
            slots = out.slot_mappings + group * out.max_num_tokens
            tl.store(slots + i + lane, _PAD_SLOT, mask=behind)


@triton.jit
def _store_hidden(
    sources,
    hidden,
    row,
    source_row,
    fallback,  # row of the fallback for those that have no source's, a number
    has_none,
    live,
    chunk,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """A chunk of columns of a block of rows: copied, or the fallback's."""
    CHUNKS: tl.constexpr = (SIZE + BLOCK_H - 1) // BLOCK_H
    which = chunk // CHUNKS
    col = chunk % CHUNKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = col < SIZE
    other = hidden.fallback + (fallback * SOURCES + which) * SIZE
    other = tl.load(other + col, mask=inside, other=0)
    at = source_row.to(tl.int64)[:, None] * SIZE + col[None, :]
    copied = (live & ~has_none)[:, None] & inside[None, :]
    value = tl.broadcast_to(other[None, :], (has_none.shape[0], BLOCK_H))
    for s in tl.static_range(SOURCES):
        value = tl.load(sources[s] + at, mask=copied & (which == s), other=value)
    to = (row.to(tl.int64)[:, None] * SOURCES + which) * SIZE + col[None, :]
    tl.store(hidden.out + to, value, mask=live[:, None] & inside[None, :])


# Numbers that vary while serving are not specialised: each would compile again.
@triton.jit(do_not_specialize=[name for name in Numbers._fields if name.islower()])
def _prepare_inputs_kernel(
    src,  # VerifiedBatch or PreviousDrafts
    tables,  # KVTables
    out,  # DraftBatch
    sources,  # HiddenRows.sources or ()
    hidden,  # FedStates or None
    # Numbers
    draft_pass,
    num_samples,
    num_padded_tokens,
    limit,
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
    if tl.program_id(1) * BLOCK >= count:
        return  # beside a long prompt a decoding request has few slots

    at = slot + SHIFT  # index of the slot's token in the request
    in_batch = slot < count
    position = start + slot
    live = in_batch & (at < valid + num_samples) & (position < limit)
    is_mask = at > valid
    fallback, has_none = 0, is_mask
    if SOURCES > 0 and SHIFT == 0:
        has_none = slot < 0
        if IS_FIRST:
            has_none = slot == 0
            fallback, is_new = _block_before(tables, hidden, state, start)
            live &= is_new | ~has_none
    row = first + slot
    chunk = tl.program_id(2) - 1
    if chunk >= 0:
        if SOURCES > 0:
            # The state of a token is that of the one before it.
            before = tl.minimum(at, valid) - 1
            if IS_FIRST:
                source_row = _verified_row(begin, before)
            else:
                source_row = req * WIDTH + tl.minimum(slot, WIDTH - 1)
            _store_hidden(
                sources, hidden, row, source_row, fallback, has_none, live, chunk,
                SOURCES, SIZE, BLOCK_H,
            )  # fmt: skip
        return

    if IS_FIRST:
        token = _verified_token(src, begin, state, valid, at)
    else:
        drafts = src.draft_tokens + req * src.stride + (draft_pass - 1) * WIDTH
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
        native: run the native implementation if tensors are on a CPU and it was built.
    """
    is_first = isinstance(source, VerifiedBatch)
    slots = layout.num_follow_slots
    if is_first:
        slots = max_query_len + layout.num_extra_slots
    num_reqs = (source.idx_mapping if is_first else source.draft_tokens).shape[0]
    batch, sources = buffers.batch, () if hidden is None else hidden.sources
    assert 1 <= num_samples <= layout.parallel_width
    assert num_padded_tokens <= batch.max_num_tokens
    assert batch.slot_mappings.shape[0] == block_tables.num_kv_cache_groups
    numbers = Numbers(
        draft_pass=0 if is_first else source.draft_pass,
        num_samples=num_samples,
        num_padded_tokens=num_padded_tokens,
        limit=limit,
        mask_token_id=mask_token_id,
        SHIFT=layout.token_shift,
        WIDTH=layout.parallel_width,
        IS_FIRST=is_first,
        GROUPS=block_tables.num_kv_cache_groups,
        SOURCES=len(sources),
        SIZE=sources[0].shape[1] if sources else 0,
    )
    arguments = (
        source if is_first else _previous_drafts(source),
        _kv_tables(block_tables),
        batch,
        sources,
        None if hidden is None else _fed_states(hidden, buffers, is_first),
    )
    library = native_library() if native and buffers.device.type == "cpu" else None
    if library is not None:
        return native_kernel.launch(library, num_reqs, *arguments, numbers)
    # Rows with hidden states are long: fewer of them keep more programs busy. The same
    # for every batch, lest one of another size compiles the kernel again.
    block = 16 if sources else 128
    block_h = min(triton.next_power_of_2(numbers.SIZE), 512) if sources else 1
    chunks = len(sources) * triton.cdiv(numbers.SIZE, block_h)
    _prepare_inputs_kernel[(num_reqs, triton.cdiv(slots, block), 1 + chunks)](
        *arguments,
        **numbers._asdict(),
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(layout.parallel_width),
        BLOCK_H=block_h,
    )


def native_library() -> ctypes.CDLL | None:
    """The native implementation, for tensors on a CPU; None where it was not built."""
    return native_kernel.load()


def _previous_drafts(source: PreviousPass) -> PreviousDrafts:
    assert source.draft_pass > 0 and source.draft_tokens.stride(1) == 1
    return PreviousDrafts(source.draft_tokens, source.draft_tokens.stride(0))


def _kv_tables(tables: BlockTables) -> KVTables:
    num_blocks = tables.num_blocks.gpu
    return KVTables(
        tables.block_table_ptrs,
        tables.block_table_strides,
        tables.block_sizes_tensor,
        num_blocks,
        num_blocks.stride(0),
    )


def _fed_states(hidden: HiddenRows, buffers: DraftBuffers, is_first: bool) -> FedStates:
    out = buffers.fed_rows(hidden.fallback) if is_first else buffers.own_rows
    size = sum(source.shape[1] for source in hidden.sources)
    assert all(rows.is_contiguous() for rows in (*hidden.sources, hidden.fallback))
    assert size == hidden.fallback.shape[-1] == out.shape[1]
    return FedStates(hidden.fallback, hidden.kv_group, out)
