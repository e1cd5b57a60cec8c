# SPDX-License-Identifier: Apache-2.0
"""The input kernel: writes a draft batch in one launch.

It is made of the verified batch, or of the previous pass. `layout.py` defines the
slots; the kernel's inputs and outputs are the tuples declared here, and only here: the
kernel takes them as they are, and `inputs.py` allocates the draft batch from its
declaration, and launches the kernel. The specification is `prepare_inputs_reference.py`
among the tests, the same function in plain PyTorch.

R is the maximum number of requests, N the slots of the widest draft batch, G the number
of KV groups, W the layout's parallel width, B its beams, D the number of M-RoPE
dimensions (0 if the drafter takes plain positions).
"""

from typing import Annotated, NamedTuple

import torch

from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.buffer_utils import _load_ptr

Int32 = Annotated[torch.Tensor, torch.int32]
Int64 = Annotated[torch.Tensor, torch.int64]
Float32 = Annotated[torch.Tensor, torch.float32]
Addresses = Annotated[torch.Tensor, torch.uint64]
States = Annotated[torch.Tensor, None]  # hidden states, of any dtype


class Size(NamedTuple):
    """Shape of a buffer, in the names of the docstring above, and its padding."""

    shape: tuple[str, ...]
    # Value of entries that belong to no request; None if there are none.
    padding: int | None


class VerifiedBatch(NamedTuple):
    """The target's batch after verification; n requests, padded ones at the end.

    A padded request has no query tokens. One whose `idx_mapping` is -1 is a dummy: it
    has slots, but owns no KV blocks and is not sampled.
    """

    input_ids: Int32  # [num_tokens]
    positions: Int64  # [num_tokens]
    query_start_loc: Int32  # [n + 1]
    idx_mapping: Int64  # [n], request state or -1
    num_sampled: Int32  # [n], 0 while a prompt is being chunked
    num_rejected: Int32  # [n]
    last_sampled: Int64  # [R] or [R, 1], by request state
    next_prefill_tokens: Int32  # [R], by request state
    temperature: Float32  # [R], by request state
    seeds: Int64  # [R], by request state
    # If D > 0: [D, at least num_tokens], M-RoPE positions, and [R], by request state,
    # how far they are ahead of `positions` past the prompt.
    rope_positions: Int64 | None = None
    rope_deltas: Int32 | None = None


class PreviousDrafts(NamedTuple):
    """The drafts that a later pass continues from."""

    draft_tokens: Int64  # [n, K], the drafts so far, or [n, B] if the layout has beams
    parents: Int32 | None = None  # [n, B], sampled slot that each beam continues


class KVTables(NamedTuple):
    """The KV blocks that requests hold, by KV group."""

    block_tables: Addresses  # [G], of [R, max_blocks] int32
    strides: Int64  # [G], of the block tables
    block_sizes: Int32  # [G]
    num_blocks: Int32  # [G, R], by request state
    num_blocks_stride: int


class DraftBatch(NamedTuple):
    """The draft batch, as the input kernel writes it and a pass reads it."""

    # By slot.
    input_ids: Annotated[Int32, Size(("N",), 0)]
    positions: Annotated[Int64, Size(("N",), 0)]
    # M-RoPE positions. The additional column is unused: vLLM compiles models for
    # positions that are not contiguous, whatever their number.
    rope_positions: Annotated[Int64, Size(("D", "N + 1"), 0)]
    slot_mappings: Annotated[Int64, Size(("G", "N"), PAD_SLOT_ID)]
    # By request.
    query_start_loc: Annotated[Int32, Size(("R + 1",), 0)]  # padding: the batch's end
    seq_lens: Annotated[Int32, Size(("R",), 0)]
    # Position of the first sampled slot of the first pass: later passes count from it.
    first_positions: Annotated[Int64, Size(("R",), -1)]
    idx_mapping: Annotated[Int64, Size(("R",), -1)]  # request state
    num_blocks: Annotated[Int32, Size(("G", "R"), 0)]  # KV blocks held
    rope_deltas: Annotated[Int32, Size(("R",), 0)]
    # By sampled slot, W per request: the row, the position before the draft's own, and
    # the request state, -1 where nothing may be sampled.
    sample_rows: Annotated[Int64, Size(("R * W",), 0)]
    sample_positions: Annotated[Int64, Size(("R * W",), 0)]
    sample_requests: Annotated[Int64, Size(("R * W",), -1)]
    # By request state: copies, since the engine's change address each step.
    temperature: Annotated[Float32, Size(("R",), None)]
    seeds: Annotated[Int64, Size(("R",), None)]

    max_num_reqs: int  # R
    max_num_tokens: int  # N


class HiddenRows(NamedTuple):
    """Where the draft batch's hidden states come from.

    The S sources are concatenated in a row of the draft batch, S * H wide.
    """

    # S x [num_tokens, H], the target's rows, or one [n * W, H], the drafter's own at
    # the slots that the previous pass sampled. The kernel takes them separately.
    sources: tuple[torch.Tensor, ...] | None
    # For slots without a source row. With token_shift 1: [S * H], for masks. With
    # token_shift 0: [2 * blocks, S * H], `KeptStates.states`, for slot 0.
    fallback: States
    # With token_shift 0: [2 * blocks], positions of the tokens of these states, and the
    # KV group of the blocks.
    positions: Int64 | None = None
    kv_group: int = 0


_PAD_SLOT = tl.constexpr(PAD_SLOT_ID)


@triton.jit
def _first_row(src, req, num_reqs, extra):
    """Row where a request's slots begin; a large number past the last request."""
    begin = tl.load(src.query_start_loc + req, mask=req < num_reqs, other=1 << 30)
    return begin + req * extra


@triton.jit
def _request_of(
    src, row, row0, num_reqs, extra, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Requests of a block of rows, from `row0` on; the last one if a row has none.

    A row's request is the number of requests that begin at or before it, minus one.
    All requests are counted for `row0`. For the rows after it the next BLOCK requests
    suffice, since each has at least one row.
    """
    every = _first_row(src, tl.arange(0, BLOCK_R), num_reqs, extra)
    at_row0 = tl.sum((every <= row0).to(tl.int32), axis=0) - 1
    behind = at_row0 + 1 + tl.arange(0, BLOCK)
    begins = _first_row(src, behind, num_reqs, extra)
    more = (begins[None, :] <= row[:, None]).to(tl.int32)
    return at_row0 + tl.sum(more, axis=1)


@triton.jit
def _verified_requests(src, req, num_reqs, extra):
    """Requests of the verified batch. Numbers of padded requests are meaningless.

    Returns, for each: its state, row of its first token there, row of its first slot,
    number of slots, number of valid tokens, position of slot 0, and whether it is real.
    """
    known = req < num_reqs
    begin = tl.load(src.query_start_loc + req, mask=known, other=0)
    end = tl.load(src.query_start_loc + req + 1, mask=known, other=0)
    is_real = begin < end
    state = tl.load(src.idx_mapping + req, mask=is_real, other=-1)
    valid = end - begin - tl.load(src.num_rejected + req, mask=is_real, other=0)
    start = tl.load(src.positions + begin, mask=is_real, other=0)
    count = end - begin + extra
    return state, begin, begin + req * extra, count, valid, start, is_real


@triton.jit
def _later_requests(
    out, req, num_reqs, draft_pass, width, SHIFT: tl.constexpr, BEAMS: tl.constexpr
):
    """Like `_verified_requests`, for the previous pass: its W rows are all valid."""
    slots = (2 * width - 1) * BEAMS
    rows = tl.where(draft_pass > 1, width * BEAMS, width)
    origin = tl.load(out.first_positions + req, mask=req < num_reqs, other=-1)
    is_real = origin >= 0
    state = tl.load(out.idx_mapping + req, mask=is_real, other=-1)
    start = origin + (draft_pass - 1) * width + 1
    # Chosen so that the last draft is the token after the valid ones.
    valid = width - 1 + SHIFT + 0 * req
    return state, req * rows, req * slots, slots + 0 * req, valid, start, is_real


@triton.jit
def _kv_slots_before(draft_pass, BEAMS: tl.constexpr):
    """How far the KV slot of a pass's first beam is ahead of its position."""
    return (draft_pass - 1) * (BEAMS - 1)


@triton.jit
def _verified_token(src, req, state, begin, valid, at, live):
    """Token `at` of a request's valid tokens; at == valid is the one after them."""
    token = tl.load(src.input_ids + begin + at, mask=live & (at < valid), other=0)
    is_next = live & (at == valid) & (state >= 0)
    sampled = is_next & (tl.load(src.num_sampled + req, mask=is_next, other=0) > 0)
    last = tl.load(src.last_sampled + state, mask=sampled, other=0).to(tl.int32)
    prompt = src.next_prefill_tokens + state
    prompt = tl.load(prompt, mask=is_next & ~sampled, other=0).to(tl.int32)
    return tl.where(at == valid, tl.where(sampled, last, prompt), token)


@triton.jit
def _num_blocks(tables, out, req, state, group, IS_FIRST: tl.constexpr):
    """KV blocks that requests hold; a dummy request holds none.

    The address of the engine's counts changes each step. Later passes, which a graph
    replays, read the copy that the first pass makes.
    """
    if IS_FIRST:
        held = tables.num_blocks + group * tables.num_blocks_stride + state
    else:
        held = out.num_blocks + group * out.max_num_reqs + req
    return tl.load(held, mask=state >= 0, other=0)


@triton.jit
def _block_ids(tables, state, block, group, mask):
    """Ids of KV blocks, given by their index in the request; 0 where masked out."""
    table = _load_ptr(tables.block_tables + group, tl.int32)
    table += state * tl.load(tables.strides + group)
    return tl.load(table + block, mask=mask, other=0).to(tl.int64)


@triton.jit
def _state_before(tables, out, hidden, req, state, start, wanted):
    """Row of the fallback with the hidden state of the token before a request's slots.

    The KV block of that token keeps the state of the token that ends it, and that of
    its last token so far. If the state kept there is of another token, row 0.
    """
    group = hidden.kv_group
    size = tl.load(tables.block_sizes + group)
    block, wanted = (start - 1) // size, wanted & (start > 0)
    held = wanted & (block < _num_blocks(tables, out, req, state, group, True))
    block_id = _block_ids(tables, state, block, group, held)
    row = 2 * block_id + (start % size != 0).to(tl.int64)
    kept = tl.load(hidden.positions + row, mask=wanted, other=-1)
    return tl.where(kept == start - 1, row, 0)


@triton.jit
def _store_slots(
    tables,
    out,
    req,
    state,
    row,
    position,
    inside,
    live,
    GROUPS: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Stores KV slots of a block of rows; PAD where the request owns no block."""
    for group in tl.static_range(GROUPS):
        size = tl.load(tables.block_sizes + group)
        block = position // size
        owned = live & (block < _num_blocks(tables, out, req, state, group, IS_FIRST))
        block_id = _block_ids(tables, state, block, group, owned)
        # Block 0 is the null block, which takes the place of freed blocks.
        slot = tl.where(block_id > 0, block_id * size + position % size, _PAD_SLOT)
        to = out.slot_mappings + group * out.max_num_tokens + row
        tl.store(to, slot, mask=inside)


@triton.jit
def _rope_delta(src, out, req, state, known, IS_FIRST: tl.constexpr):
    """M-RoPE minus plain positions, past the prompt."""
    delta = src.rope_deltas + state if IS_FIRST else out.rope_deltas + req
    return tl.load(delta, mask=known & (state >= 0), other=0)


@triton.jit
def _store_rope_positions(
    src,
    out,
    req,
    state,
    row,
    source_row,
    is_known,
    position,
    inside,
    live,
    rope_stride,
    DIMS: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Stores M-RoPE positions of a block of rows: the target's, for its own tokens.

    Slots after those are text, like everything past a prompt, so their position is the
    same in every dimension.
    """
    value = position + _rope_delta(src, out, req, state, live, IS_FIRST)
    for dim in tl.static_range(DIMS):
        if IS_FIRST:
            own = src.rope_positions + dim * rope_stride + source_row
            value = tl.load(own, mask=live & is_known, other=value)
        to = out.rope_positions + dim * (out.max_num_tokens + 1) + row
        tl.store(to, tl.where(live, value, 0), mask=inside)


@triton.jit
def _store_hidden(
    sources,
    hidden,
    fed,
    row,
    source_row,
    fallback,  # row of the fallback, for slots without a source row
    has_none,
    live,
    chunk,
    SOURCES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Stores a chunk of columns of a block of rows, from a source or the fallback."""
    CHUNKS: tl.constexpr = (SIZE + BLOCK_H - 1) // BLOCK_H
    which = chunk // CHUNKS
    col = chunk % CHUNKS * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = (col < SIZE)[None, :]
    at = (fallback.to(tl.int64)[:, None] * SOURCES + which) * SIZE + col[None, :]
    missing = (live & has_none)[:, None] & inside
    value = tl.load(hidden.fallback + at, mask=missing, other=0)
    at = source_row.to(tl.int64)[:, None] * SIZE + col[None, :]
    copied = (live & ~has_none)[:, None] & inside
    for s in tl.static_range(SOURCES):
        value = tl.load(sources[s] + at, mask=copied & (which == s), other=value)
    to = (row.to(tl.int64)[:, None] * SOURCES + which) * SIZE + col[None, :]
    tl.store(fed + to, value, mask=live[:, None] & inside)


@triton.jit
def _num_requests(src, out, num_reqs, IS_FIRST: tl.constexpr, BLOCK_R: tl.constexpr):
    """Number of requests, without the padded ones at the end."""
    req = tl.arange(0, BLOCK_R)
    known = req < num_reqs
    if IS_FIRST:
        begin = tl.load(src.query_start_loc + req, mask=known, other=0)
        end = tl.load(src.query_start_loc + req + 1, mask=known, other=0)
        is_real = begin < end
    else:
        is_real = tl.load(out.first_positions + req, mask=known, other=-1) >= 0
    return tl.sum(is_real.to(tl.int32), axis=0)


@triton.jit
def _store_requests(
    src,
    tables,
    out,
    req,
    draft_pass,
    num_reqs,
    num_samples,
    limit,
    width,
    SHIFT: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    DIMS: tl.constexpr,
    BEAMS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Stores what sampling, attention and later passes read for a block of requests."""
    inside = req < out.max_num_reqs
    num_real = _num_requests(src, out, num_reqs, IS_FIRST, BLOCK_R)
    if IS_FIRST:
        extra = width - SHIFT
        requests = _verified_requests(src, req, num_reqs, extra)
        batch_end = tl.load(src.query_start_loc + num_reqs) + num_real * extra
    else:
        requests = _later_requests(out, req, num_reqs, draft_pass, width, SHIFT, BEAMS)
        batch_end = num_real * (2 * width - 1) * BEAMS
    state, _, first, count, valid, start, is_real = requests
    end = tl.where(is_real, first + count, batch_end)
    tl.store(out.query_start_loc + 1 + req, end, mask=inside)
    tl.store(out.query_start_loc + req, 0, mask=req == 0)
    # Padding slots count too: the last query aligns with the last key, so that causal
    # attention gives every valid slot exactly the keys before it.
    length = start + count + _kv_slots_before(draft_pass, BEAMS)
    length = tl.where(is_real, length, 0).to(tl.int32)
    tl.store(out.seq_lens + req, length, mask=inside)

    draft = tl.arange(0, BLOCK_W)[None, :]
    slot = (valid - SHIFT)[:, None] + draft
    position = start[:, None] + slot
    to = req[:, None] * width + draft
    each = inside[:, None] & (draft < width)
    is_sampled = is_real[:, None] & (draft < num_samples) & (position < limit)
    if BEAMS > 1:
        is_sampled &= (length <= limit)[:, None]
    row = tl.where(is_real[:, None], first[:, None] + slot, 0)
    tl.store(out.sample_rows + to, row, mask=each)
    position = tl.where(is_real[:, None], position + SHIFT, 0)
    tl.store(out.sample_positions + to, position, mask=each)
    state_or_none = tl.where(is_sampled, state[:, None], -1)
    tl.store(out.sample_requests + to, state_or_none, mask=each)

    if IS_FIRST:  # later passes use the same values
        origin = tl.where(is_real, start + valid - SHIFT, -1)
        tl.store(out.first_positions + req, origin, mask=inside)
        tl.store(out.idx_mapping + req, state, mask=inside)
        for group in tl.static_range(GROUPS):
            held = _num_blocks(tables, out, req, state, group, True)
            tl.store(out.num_blocks + group * out.max_num_reqs + req, held, is_real)
        if DIMS > 0:
            delta = _rope_delta(src, out, req, state, is_real, True)
            tl.store(out.rope_deltas + req, delta, mask=is_real)
        owned = state >= 0
        value = tl.load(src.temperature + state, mask=owned)
        tl.store(out.temperature + state, value, mask=owned)
        tl.store(out.seeds + state, tl.load(src.seeds + state, mask=owned), mask=owned)


# Numbers that vary while serving are not specialized: new values would recompile.
_VARYING = "draft_pass num_reqs num_samples num_padded_tokens limit mask_token_id "
_VARYING += "vocab_size width rope_stride draft_stride"


@triton.jit(do_not_specialize=_VARYING.split())
def prepare_inputs_kernel(
    src,  # VerifiedBatch or PreviousDrafts
    tables,  # KVTables
    out,  # DraftBatch
    sources,  # HiddenRows.sources or ()
    hidden,  # HiddenRows without them, or None
    fed,  # [N, SOURCES * SIZE], where hidden states are written, or None
    draft_pass,
    num_reqs,  # padded ones included
    num_samples,  # drafts to sample in this pass, at most the width
    num_padded_tokens,  # rows up to which the batch is padded
    limit,  # first position that must not be drafted
    mask_token_id,
    vocab_size,  # the drafter's; tokens past it, such as images', become 0
    width,  # the layout's parallel_width
    rope_stride,  # of the first dimension of rope_positions
    draft_stride,  # of the first dimension of draft_tokens
    SHIFT: tl.constexpr,  # the layout's token_shift
    IS_FIRST: tl.constexpr,
    GROUPS: tl.constexpr,
    SOURCES: tl.constexpr,  # concatenated in a row of hidden states
    SIZE: tl.constexpr,  # elements of a row of one source
    DIMS: tl.constexpr,  # D
    BEAMS: tl.constexpr,  # B; 1 in a first pass
    BLOCK: tl.constexpr,  # rows, or requests, of a program
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Programs (b, 0) store a block of requests each, then a block of rows each.
    Programs (b, 1 + c) copy chunk c of the hidden states of the block of rows."""
    chunk = tl.program_id(1) - 1
    num_request_blocks = (out.max_num_reqs + BLOCK - 1) // BLOCK
    block = tl.program_id(0) - num_request_blocks
    if block < 0:
        if chunk < 0:
            _store_requests(
                src, tables, out, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK),
                draft_pass, num_reqs, num_samples, limit, width,
                SHIFT, IS_FIRST, GROUPS, DIMS, BEAMS, BLOCK_W, BLOCK_R,
            )  # fmt: skip
        return

    row = block * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_padded_tokens
    if IS_FIRST:
        extra = width - SHIFT
        req = _request_of(src, row, block * BLOCK, num_reqs, extra, BLOCK, BLOCK_R)
        requests = _verified_requests(src, req, num_reqs, extra)
    else:
        req = row // ((2 * width - 1) * BEAMS)
        requests = _later_requests(out, req, num_reqs, draft_pass, width, SHIFT, BEAMS)
    state, begin, first, _, valid, start, is_real = requests
    slot = row - first
    beam = slot * (BEAMS > 1)
    slot -= beam
    at = slot + SHIFT  # index of the slot's token in the request
    position = start + slot
    live = inside & is_real & (at < valid + num_samples) & (position < limit)
    is_mask = at > valid

    # A slot takes the state of the preceding token; slot 0's is from another step.
    fallback, has_none = 0 * req, is_mask
    if SOURCES > 0 and SHIFT == 0:
        has_none = slot < 0
        if IS_FIRST:
            has_none = slot == 0
            first_slots = live & has_none
            fallback = _state_before(
                tables, out, hidden, req, state, start, first_slots
            )
    if chunk >= 0:
        if SOURCES > 0:
            if IS_FIRST:
                source_row = begin + tl.minimum(at, valid) - 1
            else:
                source_row = begin + tl.minimum(slot, width - 1)
                if BEAMS > 1:
                    parent = src.parents + req * BEAMS + beam
                    source_row = begin + tl.load(parent, mask=live, other=0)
            _store_hidden(
                sources, hidden, fed, row, source_row, fallback, has_none, live, chunk,
                SOURCES, SIZE, BLOCK_H,
            )  # fmt: skip
        return

    if IS_FIRST:
        token = _verified_token(src, req, state, begin, valid, at, live)
    else:
        at_pass = 0 if BEAMS > 1 else (draft_pass - 1) * width
        drafts = src.draft_tokens + req * draft_stride + at_pass + slot + beam
        known = live & (slot < width)
        token = tl.load(drafts, mask=known, other=0).to(tl.int32)
    token = tl.where(is_mask, mask_token_id, tl.where(token < vocab_size, token, 0))
    tl.store(out.input_ids + row, tl.where(live, token, 0), mask=inside)
    tl.store(out.positions + row, tl.where(live, position, 0), mask=inside)
    if DIMS > 0:
        _store_rope_positions(
            src, out, req, state, row, begin + slot, slot < valid,
            position, inside, live, rope_stride, DIMS, IS_FIRST,
        )  # fmt: skip
    kv_slot = position + beam + _kv_slots_before(draft_pass, BEAMS)
    _store_slots(tables, out, req, state, row, kv_slot, inside, live, GROUPS, IS_FIRST)
