# SPDX-License-Identifier: Apache-2.0
"""Attention of a step that verifies trees.

All rows of a request attend to the whole prefix, with the attention backend's own
kernel: non-causal, over the keys before the rows, with the log-sum-exp of its scores.
Among themselves rows attend to their ancestors. One kernel computes that part from the
step's own keys and values, which are still at hand, and merges the two softmaxes as
Flash-Decoding does. The masks are those of SpecInfer, arXiv 2305.09781, and Medusa,
arXiv 2401.10774.

Matrix products have Triton's default precision, like those of vLLM's Triton attention,
which serves a request's other steps: for float32 that is TF32, unless
TRITON_F32_DEFAULT is "ieee". A higher precision here would make output depend on which
steps have trees.
"""

import torch

from vllm.triton_utils import tl, triton

from .trees import TreeAttention


@triton.jit
def _sees(masks, row, key, leading, is_row):
    """[M, N] bool: whether query `row` of a request attends to its query `key`."""
    node, other = row - leading, key - leading
    low = tl.load(masks + (row - leading) * 2, mask=is_row & (node >= 0), other=0)
    high = tl.load(masks + (row - leading) * 2 + 1, mask=is_row & (node >= 0), other=0)
    word = tl.where((other < 64)[None, :], low[:, None], high[:, None])
    shift = (tl.maximum(other, 0) % 64).to(tl.int64)
    is_ancestor = ((word >> shift[None, :]) & 1) == 1
    is_before = (key[None, :] <= row[:, None]) & (
        (node < 0)[:, None] | (other < 0)[None, :]
    )
    return is_before | ((node >= 0)[:, None] & (other >= 0)[None, :] & is_ancestor)


@triton.jit
def _merge_tree_kernel(
    query,  # [T, HQ, D]
    key,  # [T, HK, D]
    value,  # [T, HK, D]
    prefix_out,  # [T, HQ, D], attention to the prefix
    prefix_lse,  # [HQ, T] float32, log-sum-exp of its scores
    out,  # [T, HQ, D]
    query_start_loc,
    masks,
    prefix_lens,
    num_leading,
    strides,  # of rows and heads of query, key, value, prefix_out, out; of lse
    scale,
    softcap,
    GROUP: tl.constexpr,  # query heads per KV head
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
    leading = tl.load(num_leading + req)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < queries
    at = (begin + row).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dim < D)[None, :]
    q = tl.load(
        query + (at * strides[0] + head * strides[1])[:, None] + dim[None, :],
        mask=inside,
        other=0.0,
    )

    has_prefix = tl.load(prefix_lens + req) > 0
    lse = tl.load(
        prefix_lse + head * strides[10] + at * strides[11],
        mask=is_row & has_prefix,
        other=float("-inf"),
    )
    top = tl.maximum(lse, -1e30)
    weight = tl.exp(lse - top)
    total = weight
    kept = tl.load(
        prefix_out + (at * strides[6] + head * strides[7])[:, None] + dim[None, :],
        mask=inside & has_prefix,
        other=0.0,
    )
    acc = kept.to(tl.float32) * weight[:, None]
    for first in range(0, queries, BLOCK_N):
        other = first + tl.arange(0, BLOCK_N)
        to = (begin + other).to(tl.int64)
        there = (other < queries)[:, None] & (dim < D)[None, :]
        k_at = (to * strides[2] + head // GROUP * strides[3])[:, None] + dim[None, :]
        v_at = (to * strides[4] + head // GROUP * strides[5])[:, None] + dim[None, :]
        k = tl.load(key + k_at, mask=there, other=0.0)
        v = tl.load(value + v_at, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        if SOFTCAP:
            # tanh, which Triton lacks.
            scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
        seen = _sees(masks + (begin + leading) * 2, row, other, leading, is_row)
        scores = tl.where(seen & (other < queries)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - new_top)
        p = tl.exp(scores - new_top[:, None])
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(p.to(v.dtype), v)
        top = new_top
    acc = acc / total[:, None]
    to = (at * strides[8] + head * strides[9])[:, None] + dim[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


def merge_tree(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree: TreeAttention,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """Merges attention over prefixes with attention among the rows of the step.

    Args:
        query: [T, HQ, D]; T rows of the requests with trees.
        key, value: [at least T, HK, D], of this step.
        prefix_out: [T, HQ, D], attention of each row to its prefix alone.
        prefix_lse: [HQ, T] float32, log-sum-exp of the scores of that.
        out: [at least T, HQ, D], written.
        query_start_loc: [at least R + 1] int32.
        scale, softcap: of the scores; 0.0 leaves them uncapped.
    """
    heads, size = query.shape[1:]
    row_strides = [
        stride
        for tensor in (query, key, value, prefix_out, out)
        for stride in tensor.stride()[:2]
    ]
    block_m = 16 if tree.max_query_len <= 16 else 32
    _merge_tree_kernel[
        (tree.num_reqs, heads, triton.cdiv(tree.max_query_len, block_m))
    ](
        query,
        key,
        value,
        prefix_out,
        prefix_lse,
        out,
        query_start_loc,
        tree.rows.masks,
        tree.rows.prefix_lens,
        tree.rows.num_leading,
        (*row_strides, *prefix_lse.stride()),
        scale,
        softcap,
        GROUP=heads // key.shape[1],
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_M=block_m,
        BLOCK_N=min(64, max(16, triton.next_power_of_2(tree.max_query_len))),
        SOFTCAP=softcap > 0,
        num_warps=4,
    )
