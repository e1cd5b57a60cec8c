# SPDX-License-Identifier: Apache-2.0
"""The likeliest tokens of each drafted position, with their probabilities."""

import torch

from vllm.triton_utils import tl, triton

# Columns of the vocabulary that one program of the first stage reads.
BLOCK_V = 4096


@triton.jit
def _pop_best(values, lane):
    """The largest value, its lane, and the values without it."""
    best, at = tl.max(values, 0), tl.argmax(values, 0)
    return best, at, tl.where(lane == at, float("-inf"), values)


@triton.jit
def _best_of_block_kernel(
    logits,  # [S, V]
    logits_stride,
    best,  # [S, blocks, C] float32
    ids,  # [S, blocks, C] int32
    sums,  # [S, blocks, 2] float32, largest logit and sum of exp(logit - largest)
    vocab_size,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, BLOCK)
    col = block * BLOCK + lane
    values = tl.load(
        logits + row.to(tl.int64) * logits_stride + col,
        mask=col < vocab_size,
        other=float("-inf"),
    ).to(tl.float32)
    out = row * blocks + block
    # Logits of tokens that a head cannot draft are -inf, perhaps all of a block's.
    largest = tl.maximum(tl.max(values, 0), -1e30)
    tl.store(sums + out * 2, largest)
    tl.store(sums + out * 2 + 1, tl.sum(tl.exp(values - largest), 0))
    for c in tl.static_range(C):
        value, at, values = _pop_best(values, lane)
        tl.store(best + out * C + c, value)
        tl.store(ids + out * C + c, block * BLOCK + at)


@triton.jit
def _best_of_row_kernel(
    best,
    ids,
    sums,
    log_probs,  # [S, C] float32
    tokens,  # [S, C] int32
    blocks,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    of_row = row * blocks * C + lane
    values = tl.load(best + of_row, mask=lane < blocks * C, other=float("-inf"))
    b = tl.arange(0, BLOCK_B)
    at = (row * blocks + b) * 2
    largest = tl.load(sums + at, mask=b < blocks, other=-1e30)
    sum_exp = tl.load(sums + at + 1, mask=b < blocks, other=0.0)
    top = tl.max(largest, 0)
    log_sum = top + tl.log(tl.sum(sum_exp * tl.exp(largest - top), 0))
    for c in tl.static_range(C):
        value, at, values = _pop_best(values, lane)
        tl.store(log_probs + row * C + c, value - log_sum)
        tl.store(tokens + row * C + c, tl.load(ids + row * blocks * C + at))


def best_candidates(
    logits: torch.Tensor, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens of each row, best first; of equal ones the lowest id.

    Args:
        logits: [S, V], any floating dtype; -inf for tokens that cannot be drafted.
        num_candidates: tokens per row (C), at most V.

    Returns:
        [S, C] float32 log-probabilities of the softmax over the row, and [S, C] int32
        token ids.
    """
    assert logits.stride(1) == 1
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, BLOCK_V)
    new = logits.new_empty
    best = new(rows, blocks, num_candidates, dtype=torch.float32)
    ids = new(rows, blocks, num_candidates, dtype=torch.int32)
    sums = new(rows, blocks, 2, dtype=torch.float32)
    log_probs = new(rows, num_candidates, dtype=torch.float32)
    tokens = new(rows, num_candidates, dtype=torch.int32)
    _best_of_block_kernel[(rows, blocks)](
        logits,
        logits.stride(0),
        best,
        ids,
        sums,
        vocab_size,
        C=num_candidates,
        BLOCK=BLOCK_V,
        num_warps=8,
    )
    _best_of_row_kernel[(rows,)](
        best,
        ids,
        sums,
        log_probs,
        tokens,
        blocks,
        C=num_candidates,
        BLOCK=triton.next_power_of_2(blocks * num_candidates),
        BLOCK_B=triton.next_power_of_2(blocks),
    )
    return log_probs, tokens
