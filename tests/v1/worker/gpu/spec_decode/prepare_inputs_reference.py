# SPDX-License-Identifier: Apache-2.0
"""The input kernel in plain PyTorch: its specification, slow and readable."""

import torch

from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.input_kernel import (
    DraftBatch,
    HiddenRows,
    PreviousDrafts,
    VerifiedBatch,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout, DraftPlan

# One request's slots: their tokens (None for a mask), the first one's position, their
# number with padding, and the first one's row of `HiddenRows.sources`.
_Slots = tuple[list[int | None], int, int, int]


def prepare_inputs_reference(
    buffers: DraftInputs,
    source: VerifiedBatch | PreviousDrafts,
    plan: DraftPlan,
    draft_pass: int,
    num_tokens: int,
    hidden: HiddenRows | None,
) -> None:
    """See `DraftInputs.prepare`."""
    block_tables = buffers.tables.target
    layout, num_samples = plan.layout, max(plan.num_samples(draft_pass), 1)
    mask_token_id, vocab_size, limit = buffers.limits
    is_first, out = draft_pass == 0, buffers.batch
    states = (source if is_first else out).idx_mapping.tolist()
    origins = out.first_positions.tolist()
    held = block_tables.num_blocks.gpu[:, states] if is_first else out.num_blocks
    held = held.clone()
    _pad_everything(buffers, num_tokens)
    row = 0
    for req, state in enumerate(states):
        if is_first:
            slots = _first_slots(source, layout, req, state)
        else:
            slots = _later_slots(source, layout, req, origins[req], draft_pass)
        if slots is None:
            continue
        tokens, start, count, begin = slots
        last = len(tokens) - 1
        tokens += [None] * (num_samples - 1)
        sampled = len(tokens) - num_samples  # first sampled slot
        beams = 1 if is_first else layout.num_beams
        # Beams share a position, and those of earlier passes take KV slots too.
        kv_start, end = start, start + count
        if beams > 1:
            sampled, kv_start = 0, start + (draft_pass - 1) * (beams - 1)
            end = kv_start + beams
        before = None
        if hidden is not None and layout.token_shift == 0 and is_first:
            before = _before(hidden, block_tables, state, held[:, req], start)
        for slot in range(count):
            position = start + slot if beams == 1 else start
            if slot >= len(tokens) or position >= limit:
                continue
            token = tokens[slot]
            at = row + slot
            known = 0 if token is None or token >= vocab_size else token
            out.input_ids[at] = mask_token_id if token is None else known
            out.positions[at] = position
            if buffers.rope_dims:
                rope = _rope_position(source, out, req, slot, position)
                out.rope_positions[:, at] = rope
            out.slot_mappings[:, at] = _kv_slots(
                block_tables, state, held[:, req], kv_start + slot
            )
            if hidden is not None:
                if slot == 0 and before is not None:
                    fed = before
                elif token is None and layout.token_shift:
                    fed = hidden.fallback
                else:
                    row_of = begin + min(slot, last)
                    if beams > 1:
                        row_of = begin + int(source.parents[req, slot])
                    fed = torch.cat([rows[row_of] for rows in hidden.sources])
                rows = buffers.fed_rows(fed) if is_first else buffers.own_rows
                rows[at] = fed
        for draft in range(layout.parallel_width):
            to, position = req * layout.parallel_width + draft, start + sampled + draft
            may = draft < num_samples and position < limit
            may &= beams == 1 or end <= limit
            out.sample_rows[to] = row + sampled + draft
            out.sample_positions[to] = position + layout.token_shift
            out.sample_requests[to] = state if may else -1
        out.first_positions[req] = start + sampled if is_first else origins[req]
        out.idx_mapping[req] = state
        if is_first:
            out.num_blocks[:, req] = held[:, req] if state >= 0 else 0
            if buffers.rope_dims:
                out.rope_deltas[req] = source.rope_deltas[state] if state >= 0 else 0
        if is_first and state >= 0:
            out.temperature[state] = source.temperature[state]
            out.seeds[state] = source.seeds[state]
        row += count
        out.query_start_loc[req + 1 :] = row
        out.seq_lens[req] = end


def _pad_everything(buffers: DraftInputs, num_padded_tokens: int) -> None:
    batch = buffers.batch
    batch.input_ids[:num_padded_tokens] = 0
    batch.positions[:num_padded_tokens] = 0
    batch.rope_positions[:, :num_padded_tokens] = 0
    batch.slot_mappings[:, :num_padded_tokens] = PAD_SLOT_ID
    for tensor in (batch.sample_rows, batch.sample_positions):
        tensor.zero_()
    for tensor in (batch.query_start_loc, batch.seq_lens):
        tensor.zero_()
    for tensor in (batch.sample_requests, batch.first_positions, batch.idx_mapping):
        tensor.fill_(-1)


def _first_slots(
    batch: VerifiedBatch, layout: DraftLayout, req: int, state: int
) -> _Slots | None:
    begin, end = batch.query_start_loc[req : req + 2].tolist()
    if begin == end:
        return None
    valid = end - begin - int(batch.num_rejected[req])
    tokens: list[int | None] = batch.input_ids[begin : begin + valid].tolist()
    after = batch.last_sampled if batch.num_sampled[req] else batch.next_prefill_tokens
    tokens.append(int(after.flatten()[state]) if state >= 0 else 0)
    start = int(batch.positions[begin])
    count = end - begin + layout.num_extra_slots
    return tokens[layout.token_shift :], start, count, begin + layout.token_shift - 1


def _later_slots(
    source: PreviousDrafts, layout: DraftLayout, req: int, origin: int, draft_pass: int
) -> _Slots | None:
    if origin < 0:
        return None
    width, beams = layout.parallel_width, layout.num_beams
    if beams > 1:
        begin = req * (beams if draft_pass > 1 else 1)
        tokens = source.draft_tokens[req].tolist()
        return tokens, origin + draft_pass, beams, begin
    done = (draft_pass - 1) * width
    tokens = source.draft_tokens[req, done : done + width].tolist()
    return tokens, origin + done + 1, layout.num_follow_slots, req * width


def _rope_position(
    source: VerifiedBatch | PreviousDrafts,
    out: DraftBatch,
    req: int,
    slot: int,
    position: int,
) -> torch.Tensor:
    """[D], the target's own; for text after its tokens, the same in all dimensions."""
    if isinstance(source, PreviousDrafts):
        return position + out.rope_deltas[req]
    state, begin = int(source.idx_mapping[req]), int(source.query_start_loc[req])
    end = int(source.query_start_loc[req + 1]) - int(source.num_rejected[req])
    if begin + slot < end:
        return source.rope_positions[:, begin + slot]
    return torch.tensor(
        position + (int(source.rope_deltas[state]) if state >= 0 else 0)
    )


def _before(
    hidden: HiddenRows, tables: BlockTables, state: int, held: torch.Tensor, start: int
) -> torch.Tensor:
    """The hidden state of the token before slot 0, if its block keeps it.

    A block has a separate row for the token that ends it.
    """
    size, block_id = tables.block_sizes[hidden.kv_group], 0
    block = (start - 1) // size
    if state >= 0 and 0 <= block < int(held[hidden.kv_group]):
        block_id = int(tables.block_tables[hidden.kv_group].gpu[state, block])
    row = 2 * block_id + int(start % size != 0)
    is_known = int(hidden.positions[row]) == start - 1
    return hidden.fallback[row if is_known else 0]


def _kv_slots(
    tables: BlockTables, state: int, held: torch.Tensor, position: int
) -> torch.Tensor:
    slots = []
    for group, size in enumerate(tables.block_sizes):
        block, slot = position // size, PAD_SLOT_ID
        if state >= 0 and block < int(held[group]):
            block_id = int(tables.block_tables[group].gpu[state, block])
            if block_id > 0:  # 0 is the null block
                slot = block_id * size + position % size
        slots.append(slot)
    return torch.tensor(slots)
