# SPDX-License-Identifier: Apache-2.0
"""The verified batch that the drafter goes on from: accepted rows only.

A drafter is fed the tokens of the accepted path, at most K + 1 of them, whatever N is.
So a request with a tree shrinks to K + 1 rows, of which the path's come first.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch


class Accepted(NamedTuple):
    """A step's batch without the rows that no drafter needs; T' rows are left.

    Attributes:
        batch: as the step's, with T' rows.
        num_rejected: [n] int32, rows at each request's end that hold nothing.
        rows: [T'] int64, the row of the step that each of them is.
        slot_mappings: [G, T'] int64, where their KV lies now.
    """

    batch: InputBatch
    num_rejected: torch.Tensor
    rows: torch.Tensor
    slot_mappings: torch.Tensor


@triton.jit
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
    is_tree, leading = logits > DEPTH + 1, queries - logits
    for first in range(0, count, BLOCK):
        i = first + tl.arange(0, BLOCK)
        inside = i < count
        on_path = is_tree & (i >= leading) & inside
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


def accepted_rows(
    batch: InputBatch,
    max_depth: int,
    path: torch.Tensor,
    num_rejected: torch.Tensor,
    slot_mappings: torch.Tensor,
) -> Accepted:
    """Of a step with trees, once the KV of accepted paths has been moved.

    Args:
        max_depth: of trees (K).
        path: [n, K + 1] int32, row of each accepted node, from row 0 on; any row of
            the request behind the last one.
        num_rejected: [n] int32, rows of the step that were not accepted.
        slot_mappings: [G, at least the batch's rows] int64, slots by row number.
    """
    beyond = np.maximum(batch.num_draft_tokens_per_req - max_depth, 0)
    kept = batch.num_scheduled_tokens - beyond
    shrunk = shrunk_batch(batch, kept)
    accepted = Accepted(
        shrunk,
        torch.empty_like(num_rejected),
        slot_mappings.new_empty(shrunk.num_tokens),
        slot_mappings.new_empty(len(slot_mappings), shrunk.num_tokens),
    )
    _accepted_rows_kernel[(batch.num_reqs,)](
        accepted.rows,
        shrunk.input_ids,
        shrunk.positions,
        accepted.slot_mappings,
        shrunk.num_tokens,
        accepted.num_rejected,
        batch.input_ids,
        batch.positions,
        slot_mappings,
        slot_mappings.stride(0),
        batch.query_start_loc,
        shrunk.query_start_loc,
        batch.cu_num_logits,
        num_rejected,
        path,
        GROUPS=len(slot_mappings),
        DEPTH=max_depth,
        BLOCK=128,
    )
    return accepted


def shrunk_batch(batch: InputBatch, num_tokens: np.ndarray) -> InputBatch:
    """A batch of the same requests with fewer rows, whose contents are yet to come.

    Args:
        num_tokens: [n] int32, rows of each request.
    """
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
