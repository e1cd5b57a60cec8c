# SPDX-License-Identifier: Apache-2.0
"""The argmax of each row of logits, in every draft pass.

PyTorch's argmax reads a whole row with one thread block, which takes five times as long
as reading the few rows that a draft pass samples; the kernels here run many programs
per row. On a CPU PyTorch compares one logit at a time, and NumPy a vector of them: 8
rows of 128256 logits take 0.07 ms instead of 0.45, in bfloat16 0.13 instead of 1.9.
"""

import torch

from vllm.triton_utils import tl, triton

BLOCK = 4096  # tokens that one program reads

LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def make_keys(values, ids):
    """int64 keys in the order of values; of equal values the lowest id is largest.

    NaN counts as -inf, so that even a row of NaN has a token: a padding row may have
    them, and the tokens of padding rows are looked up like others.
    """
    values = tl.where(values == values, values, float("-inf"))
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (order.to(tl.int64) << 32) + (LAST_ID - ids)


@triton.jit
def id_of_key(key):
    return ((key & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def _best_of_block_kernel(
    logits,  # [S, V]
    logits_stride,
    keys,  # [S, blocks] int64
    vocab_size,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    col = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        logits + row.to(tl.int64) * logits_stride + col,
        mask=col < vocab_size,
        other=float("-inf"),
    ).to(tl.float32)
    best = tl.max(make_keys(values, col), 0)
    tl.store(keys + row * tl.num_programs(1) + block, best)


@triton.jit
def _best_of_blocks_kernel(
    keys,
    tokens,  # [S] int64
    num_blocks,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.arange(0, BLOCK)
    at = keys + row * num_blocks + block
    best = tl.max(tl.load(at, mask=block < num_blocks, other=-(2**63)), 0)
    tl.store(tokens + row, id_of_key(best).to(tl.int64))


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The token with the largest logit of each row; ties go to the lowest id.

    Args:
        logits: [S, V], any floating dtype up to 32 bits.

    Returns:
        [S] int64, below V.
    """
    if logits.is_cpu:
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    if not logits.is_cuda:
        return logits.argmax(dim=-1)
    return find_best_tokens(logits)


def find_best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The same, with Triton kernels."""
    assert logits.stride(1) == 1
    rows, vocab_size = logits.shape
    blocks = triton.cdiv(vocab_size, BLOCK)
    keys = logits.new_empty(rows, blocks, dtype=torch.int64)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    _best_of_block_kernel[(rows, blocks)](
        logits, logits.stride(0), keys, vocab_size, BLOCK=BLOCK
    )
    _best_of_blocks_kernel[(rows,)](
        keys, tokens, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1
    )
    return tokens
