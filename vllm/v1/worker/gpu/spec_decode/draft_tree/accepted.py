# SPDX-License-Identifier: Apache-2.0
"""The verified batch that the drafter receives: accepted rows only.

A drafter takes the tokens of the accepted path, at most K + 1 of them, whatever N is.
So a request with a tree shrinks to K + 1 rows, of which the path's come first.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch


class TargetStep(NamedTuple):
    """A step of the target, as its drafter receives it.

    Attributes:
        batch: the verified batch, of T rows.
        num_rejected: [n] int32, rows at each request's end that were not accepted.
        last_hidden: [at least T, H], the target's output.
        aux_hidden: [at least T, H] each, of the tapped layers.
        slot_mappings: [G, at least T] int64, KV slots.
        rope_positions: [D, at least T] int64, M-RoPE positions; None if the target has
            none, or its drafter does not use them.
    """

    batch: InputBatch
    num_rejected: torch.Tensor
    last_hidden: torch.Tensor
    aux_hidden: list[torch.Tensor] | None
    slot_mappings: torch.Tensor
    rope_positions: torch.Tensor | None = None

    def at(self, rows: torch.Tensor) -> "TargetStep":
        """The same with the hidden states and M-RoPE positions of some rows."""
        aux = self.aux_hidden and [states[rows] for states in self.aux_hidden]
        rope = self.rope_positions
        return self._replace(
            last_hidden=self.last_hidden[rows],
            aux_hidden=aux,
            rope_positions=None if rope is None else rope[:, rows],
        )


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
    return step._replace(**kept).at(rows)


def dummy_rows(step: TargetStep, max_depth: int) -> TargetStep:
    """Like `accepted_rows`, for a dummy batch: as many rows, with any content."""
    batch = step.batch
    shrunk = shrunk_batch(batch, max_depth, batch.num_scheduled_tokens - 1)
    rows = torch.arange(shrunk.num_tokens, device=batch.input_ids.device)
    shrunk.input_ids.zero_()
    shrunk.positions.zero_()
    return step._replace(batch=shrunk).at(rows)


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
