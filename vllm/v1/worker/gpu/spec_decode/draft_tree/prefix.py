# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's rows to their prefix, for backends without a kernel for it.

Every row of a request attends to all of its prefix, so nothing is masked.
FlashAttention has a faster kernel that returns the same; this one serves other backends
whose KV cache holds K and V of a token side by side, and dtypes that FlashAttention
lacks. For its precision see `attention.py`.
"""

import torch

from vllm.triton_utils import tl, triton

from .trees import TreeAttention


@triton.jit
def _attend_prefix_kernel(
    query,  # [T, HQ, D]
    kv_cache,  # [blocks, HK, block_size, 2 * D]
    block_table,  # [n, most blocks] int32
    out,  # [T, HQ, D] contiguous
    lse,  # [HQ, T] float32
    query_start_loc,
    prefix_lens,
    query_strides,  # of rows and heads
    cache_strides,  # of blocks, heads and slots
    table_stride,
    lse_stride,
    block_size,
    scale,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    req, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start_loc + req)
    queries = tl.load(query_start_loc + req + 1) - begin
    if block * BLOCK_M >= queries:
        return
    prefix = tl.load(prefix_lens + req)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, at = row < queries, (begin + row).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dim < D)[None, :]
    q_at = (at * query_strides[0] + head * query_strides[1])[:, None] + dim[None, :]
    q = tl.load(query + q_at, mask=inside, other=0.0)

    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    cache = kv_cache + head // GROUP * cache_strides[1]
    for first in range(0, prefix, BLOCK_N):
        pos = first + tl.arange(0, BLOCK_N)
        is_key = pos < prefix
        page = block_table + req * table_stride + pos // block_size
        page = tl.load(page, mask=is_key, other=0).to(tl.int64)
        slot = page * cache_strides[0] + pos % block_size * cache_strides[2]
        kv_at = slot[:, None] + dim[None, :]
        there = is_key[:, None] & (dim < D)[None, :]
        k = tl.load(cache + kv_at, mask=there, other=0.0)
        v = tl.load(cache + kv_at + D, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink, p = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(p.to(v.dtype), v)
        top = new_top
    some = tl.maximum(total, 1e-30)
    to = ((at * HEADS + head) * D)[:, None] + dim[None, :]
    tl.store(out + to, (acc / some[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * lse_stride + at, top + tl.log(some), mask=is_row)


def attend_prefix(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree: TreeAttention,
    scale: float,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows to their prefixes, and its log-sum-exp.

    Args:
        query: [T, HQ, D], rows of the requests with trees.
        kv_cache: [blocks, HK, block_size, 2 * D], K before V.
        block_table: [at least n, most blocks] int32.
        query_start_loc: [at least n + 1] int32.
        scale, softcap: of the scores; 0.0 leaves them uncapped.

    Returns:
        [T, HQ, D] in the dtype of the query, and [HQ, T] float32, the log-sum-exp of
        the scores. Rows without a prefix are zeros, and not used.
    """
    rows, heads, size = query.shape
    assert kv_cache.stride(3) == 1 and kv_cache.shape[3] == 2 * size
    out = torch.empty(rows, heads, size, dtype=query.dtype, device=query.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    block_m = 16 if tree.max_query_len <= 16 else 32
    blocks = triton.cdiv(tree.max_query_len, block_m)
    _attend_prefix_kernel[(tree.num_reqs, heads, blocks)](
        query,
        kv_cache,
        block_table,
        out,
        lse,
        query_start_loc,
        tree.rows.prefix_lens,
        query.stride()[:2],
        kv_cache.stride()[:3],
        block_table.stride(0),
        lse.stride(0),
        kv_cache.shape[2],
        scale,
        softcap,
        HEADS=heads,
        GROUP=heads // kv_cache.shape[1],
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_M=block_m,
        BLOCK_N=32,
        SOFTCAP=softcap > 0,
        num_warps=4,
    )
    return out, lse
