# SPDX-License-Identifier: Apache-2.0
"""After verification: accepted rows for the drafter, and KV of the accepted path.

A drafter takes the tokens of the accepted path, at most K + 1 of them, whatever N is.
So a request with a tree shrinks to K + 1 rows, of which the path's come first.

Node i's KV was written to slot p + i, since nodes of the same depth share a position.
The d-th node of the accepted path belongs in slot p + d. One launch moves it in all
layers; if the path is the chain, nothing is moved.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from ..inputs import TargetStep


@triton.jit(do_not_specialize=["num_slots", "step_stride"])
def _accepted_rows_kernel(
    rows,
    input_ids,
    positions,
    slot_mappings,
    num_slots,  # of a KV group in slot_mappings
    num_rejected,
    step_ids,
    step_positions,
    step_slots,
    step_stride,
    query_start_loc,  # of the step
    accepted_start_loc,
    cu_num_logits,
    step_rejected,
    path,  # [n, K + 1] int32
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    begin = tl.load(query_start_loc + req)
    queries = tl.load(query_start_loc + req + 1) - begin
    to = tl.load(accepted_start_loc + req)
    count = tl.load(accepted_start_loc + req + 1) - to
    tl.store(num_rejected + req, tl.load(step_rejected + req) - queries + count)
    logits = tl.load(cu_num_logits + req + 1) - tl.load(cu_num_logits + req)
    leading = queries - logits
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < count
        on_path = (i >= leading) & inside
        node = path + req * (DEPTH + 1) + i - leading
        node = tl.load(node, mask=on_path, other=0)
        row = begin + tl.where(on_path, leading + node, i)
        tl.store(rows + to + i, row.to(tl.int64), mask=inside)
        token = tl.load(step_ids + row, mask=inside, other=0)
        tl.store(input_ids + to + i, token, mask=inside)
        position = tl.load(step_positions + row, mask=inside, other=0)
        tl.store(positions + to + i, position, mask=inside)
        for group in tl.static_range(GROUPS):
            # The path's KV was moved to the slots of the first rows.
            slot = step_slots + group * step_stride + begin + i
            slot = tl.load(slot, mask=inside, other=0)
            tl.store(slot_mappings + group * num_slots + to + i, slot, mask=inside)


def accepted_rows(step: TargetStep, max_depth: int, path: torch.Tensor) -> TargetStep:
    """Reduces a step with trees to accepted rows, whose KV has been moved before.

    Args:
        max_depth: of trees (K).
        path: [n, K + 1] int32, row of each accepted node, from row 0 on; after the last
            one, any row of the request.
    """
    batch, slots = step.batch, step.slot_mappings
    shrunk = shrunk_batch(batch, max_depth, batch.num_draft_tokens_per_req)
    rows = slots.new_empty(shrunk.num_tokens)
    kept_slots = slots.new_empty(len(slots), shrunk.num_tokens)
    num_rejected = torch.empty_like(step.num_rejected)
    _accepted_rows_kernel[(batch.num_reqs,)](
        rows,
        shrunk.input_ids,
        shrunk.positions,
        kept_slots,
        shrunk.num_tokens,
        num_rejected,
        batch.input_ids,
        batch.positions,
        slots,
        slots.stride(0),
        batch.query_start_loc,
        shrunk.query_start_loc,
        batch.cu_num_logits,
        step.num_rejected,
        path,
        GROUPS=len(slots),
        DEPTH=max_depth,
        BLOCK=128,
    )
    kept = {"batch": shrunk, "num_rejected": num_rejected, "slot_mappings": kept_slots}
    return at_rows(step._replace(**kept), rows)


def at_rows(step: TargetStep, rows: torch.Tensor) -> TargetStep:
    """The step with the hidden states and M-RoPE positions of some rows."""
    aux = step.aux_hidden and [states[rows] for states in step.aux_hidden]
    rope = step.rope_positions
    return step._replace(
        last_hidden=step.last_hidden[rows],
        aux_hidden=aux,
        rope_positions=None if rope is None else rope[:, rows],
    )


def dummy_rows(step: TargetStep, max_depth: int) -> TargetStep:
    """Like `accepted_rows`, for a dummy batch: as many rows, with any content."""
    batch = step.batch
    shrunk = shrunk_batch(batch, max_depth, batch.num_scheduled_tokens - 1)
    rows = torch.arange(shrunk.num_tokens, device=batch.input_ids.device)
    shrunk.input_ids.zero_()
    shrunk.positions.zero_()
    return at_rows(step._replace(batch=shrunk), rows)


def shrunk_batch(
    batch: InputBatch, max_depth: int, num_drafts: np.ndarray
) -> InputBatch:
    """A batch of at most K + 1 rows per tree, whose contents are not yet written.

    Args:
        num_drafts: [n] on the host, drafts of each request.
    """
    beyond = np.maximum(num_drafts - max_depth, 0)
    num_tokens = (batch.num_scheduled_tokens - beyond).astype(np.int32)
    starts = np.zeros(len(num_tokens) + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=starts[1:])
    total = int(starts[-1])
    return replace(
        batch,
        num_scheduled_tokens=num_tokens,
        num_tokens=total,
        num_tokens_after_padding=total,
        query_start_loc_np=starts,
        query_start_loc=async_tensor_h2d(starts, device=batch.input_ids.device),
        input_ids=batch.input_ids.new_empty(total),
        positions=batch.positions.new_empty(total),
    )


# Columns of the table: address, KV group, slots per block, strides of block, head and
# slot, KV heads, words per head and slot. Strides are in words of 32 bits.
COLUMNS = 8


@triton.jit(do_not_specialize=["slot_stride"])
def _move_path_kernel(
    layers,  # [L, COLUMNS] int64
    slot_mappings,  # [G, T] int64
    slot_stride,
    path,  # [n, K + 1] int32
    num_sampled,  # [n] int32
    first_rows,  # [n] int32, row 0 of each request in the batch
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req, layer, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = layers + layer * COLUMNS
    if head >= tl.load(at + 6):
        return
    cache = tl.load(at).to(tl.pointer_type(tl.int32)) + head * tl.load(at + 4)
    size, block_stride, stride = tl.load(at + 2), tl.load(at + 3), tl.load(at + 5)
    slots = slot_mappings + tl.load(at + 1) * slot_stride + tl.load(first_rows + req)
    word = tl.arange(0, BLOCK)
    inside = word < tl.load(at + 7)
    accepted = tl.load(num_sampled + req) - 1
    # From the root on: a node's slot is that of its depth or a later one, so none is
    # overwritten before it has been read. Each thread moves words of its own.
    for depth in range(1, DEPTH + 1):
        is_on = depth <= accepted
        row = tl.load(path + req * (DEPTH + 1) + depth, mask=is_on, other=depth)
        moves = is_on & (row != depth)
        source = tl.load(slots + row, mask=moves, other=0)
        to = tl.load(slots + depth, mask=moves, other=0)
        source = source // size * block_stride + source % size * stride
        to = to // size * block_stride + to % size * stride
        words = tl.load(cache + source + word, mask=inside & moves, other=0)
        tl.store(cache + to + word, words, mask=inside & moves)


class PathMover:
    """Moves KV in the cache of each layer: [blocks, heads, slots, K and V of a head].

    Args:
        caches: the KV cache of each layer, in the layout that FlashAttention reads.
        groups: the KV group of each layer.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], groups: Mapping[str, int]):
        # Layers that share KV count once. Those of other groups have other blocks of
        # the same memory.
        unique = {(cache.data_ptr(), groups[n]): cache for n, cache in caches.items()}
        rows = [self._row(cache, group) for (_, group), cache in unique.items()]
        device = next(iter(caches.values())).device
        self.layers = torch.tensor(rows, dtype=torch.int64, device=device)
        self.max_heads = max(row[6] for row in rows)
        self.block = triton.next_power_of_2(max(row[7] for row in rows))

    @staticmethod
    def _row(cache: torch.Tensor, group: int) -> list[int]:
        words = cache.view(torch.int32)
        _, heads, slots, width = words.shape
        block, head, slot, one = words.stride()
        assert one == 1
        return [cache.data_ptr(), group, slots, block, head, slot, heads, width]

    def __call__(
        self,
        slot_mappings: torch.Tensor,
        path: torch.Tensor,
        num_sampled: torch.Tensor,
        first_rows: torch.Tensor,
    ) -> None:
        """Moves the accepted path of each request, in every layer.

        Args:
            slot_mappings: [G, T] int64, KV slot of each row of the batch.
            path: [n, K + 1] int32, row of each accepted node, from row 0 on.
            num_sampled: [n] int32, accepted nodes and the bonus token.
            first_rows: [n] int32, row 0 of each request in the batch.
        """
        num_reqs, width = path.shape
        _move_path_kernel[(num_reqs, len(self.layers), self.max_heads)](
            self.layers,
            slot_mappings,
            slot_mappings.stride(0),
            path,
            num_sampled,
            first_rows,
            DEPTH=width - 1,
            COLUMNS=COLUMNS,
            BLOCK=self.block,
            num_warps=1,
        )
