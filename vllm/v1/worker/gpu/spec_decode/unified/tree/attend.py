# SPDX-License-Identifier: Apache-2.0
"""Attention of a step that verifies trees, and which backends and layers support it.

All rows of a request attend to the whole prefix, with the attention backend's own
kernel: non-causal, over the keys before the rows, with the log-sum-exp of its scores.
Among themselves rows attend to their ancestors. One kernel computes that part from the
step's own keys and values, which are still at hand, and merges the two softmaxes as
Flash-Decoding does. Draft passes that continue beams have ancestors in earlier passes:
there it reads all of these keys from the KV cache, behind the prefix. The masks are
those of SpecInfer, arXiv 2305.09781, and Medusa, arXiv 2401.10774.

Matrix products have Triton's default precision, like those of vLLM's Triton attention,
which serves a request's other steps: for float32 that is TF32, unless
TRITON_F32_DEFAULT is "ieee". A higher precision here would make output depend on which
steps have trees.

Attention to the prefix masks nothing but what is outside of a sliding window.
FlashAttention has a faster kernel that returns the same as the one here, which serves
layers with windows, where a row's is given by the depth of its node, and other backends
whose KV cache holds K and V of a token side by side. Sinks are counted when the two
parts are merged.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .trees import TreeAttention


def attend_with_tree(
    impl: Any,
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    output: torch.Tensor,
    output_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """A backend's `forward` in a step whose metadata has a tree.

    If there is a long prompt, the backend's own attention serves the requests without
    trees, which come last; what it writes for the rows of trees is overwritten.

    Raises:
        NotImplementedError: the output is to be quantized.
    """
    if output_scale is not None:
        raise NotImplementedError("draft_tree does not support quantized attention.")
    tree: TreeAttention = metadata.draft_tree
    if not tree.covers_batch:
        causal = replace(metadata, draft_tree=None)
        impl.forward(layer, query, key, value, kv_cache, causal, output)
    ATTEND[layer.attn_backend.get_name()](
        impl, layer, query, key, value, kv_cache, metadata, output
    )
    return output


def _attend_flash(impl, layer, query, key, value, kv_cache, metadata, output) -> None:
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    if window_of(impl):
        _attend_triton(impl, layer, query, key, value, kv_cache, metadata, output)
        return
    tree: TreeAttention = metadata.draft_tree
    n, num_tokens = tree.num_reqs, tree.num_tokens
    keys, values = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
    query = query[:num_tokens]
    prefix_out, prefix_lse = flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        cu_seqlens_q=metadata.query_start_loc[: n + 1],
        max_seqlen_q=tree.max_query_len,
        seqused_k=tree.rows.prefix_lens[:n],
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=impl.scale,
        causal=False,
        block_table=metadata.block_table[:n],
        softcap=impl.logits_soft_cap,
        return_softmax_lse=True,
        fa_version=impl.vllm_flash_attn_version,
    )
    scores = Scores(impl.scale, impl.logits_soft_cap, 0, impl.sinks)
    cache = metadata.query_start_loc, tree, scores, kv_cache, metadata.block_table
    merge_tree(query, key, value, prefix_out, prefix_lse, output, *cache)


def _attend_triton(impl, layer, query, key, value, kv_cache, metadata, output) -> None:
    tree: TreeAttention = metadata.draft_tree
    query = query[: tree.num_tokens]
    scores = Scores(impl.scale, impl.logits_soft_cap, window_of(impl), impl.sinks)
    cache = metadata.query_start_loc, tree, scores, kv_cache, metadata.block_table
    prefix = attend_prefix(query, *cache)
    merge_tree(query, key, value, *prefix, output, *cache)


class Scores(NamedTuple):
    """How a layer weighs keys.

    Attributes:
        scale: of the products of queries and keys.
        softcap: of the scores; 0.0 leaves them uncapped.
        window: how many tokens a row attends to, itself included; 0: all before it.
        sinks: [HQ], of each head a score without a value; None: none.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None


def window_of(impl: Any) -> int:
    """See `Scores.window`."""
    window = impl.sliding_window
    if isinstance(window, tuple):  # tokens before the row
        return window[0] + 1
    return max(window or 0, 0)


ATTEND: dict[str, Callable[..., None]] = {
    "FLASH_ATTN": _attend_flash,
    "TRITON_ATTN": _attend_triton,
}
if current_platform.is_cpu():
    from . import cpu

    ATTEND["CPU_ATTN"] = cpu.attend


def why_layer_cannot(layer: Any) -> str | None:
    """Why a layer does not support tree attention; None if it does."""
    impl = getattr(layer, "impl", None)
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend else type(layer).__name__
    if name not in ATTEND or getattr(impl, "head_size_v", None):
        return f"attention by {name}"
    if isinstance(layer, Attention) and type(layer) is not Attention:
        # Its metadata may be of other requests and rows than the step's.
        return f"attention by {type(layer).__name__}"
    if name == "CPU_ATTN" and (reason := cpu.why_not_loaded()):
        return reason
    reasons = {
        "ALiBi": impl.alibi_slopes is not None,
        "chunked attention": getattr(impl, "chunk_lookback", -1) > -1,
        # It gets no keys of the step's rows, which the kernels for GPUs read.
        "the KV of other layers": name != "CPU_ATTN"
        and getattr(impl, "kv_sharing_target_layer_name", None) is not None,
        "logits soft cap on a CPU": name == "CPU_ATTN" and impl.logits_soft_cap,
        "a quantized KV cache": is_quantized_kv_cache(impl.kv_cache_dtype),
        "encoder attention": impl.attn_type != AttentionType.DECODER,
        "FlashAttention 4": getattr(impl, "vllm_flash_attn_version", 0) == 4,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


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
def _place(depths, at, index, leading, mask):
    """How many tokens after the prefix a row of a request is, `index` of its rows."""
    depth = tl.load(depths + at, mask=mask & (index >= leading), other=0)
    return tl.where(index < leading, index, leading + depth)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr):
    scores = tl.dot(q, tl.trans(k)) * scale
    if SOFTCAP:
        # tanh, which Triton lacks.
        scores = softcap * (2 / (1 + tl.exp(-2 * scores / softcap)) - 1)
    return scores


@triton.jit
def _add_keys(top, total, acc, scores, v):
    """Adds keys to a softmax: its largest score, sum and weighted values."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink, p = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc += tl.dot(p.to(v.dtype), v)
    return new_top, total, acc


@triton.jit
def _cache_slots(table, strides, block_size, position, mask):
    """Offsets of positions of a request in its KV cache, without those of heads."""
    page = tl.load(table + position // block_size, mask=mask, other=0).to(tl.int64)
    return page * strides[0] + position % block_size * strides[2]


@triton.jit(do_not_specialize=["before"])
def _merge_tree_kernel(
    query,  # [T, HQ, D]
    key,  # [T, HK, D]
    value,  # [T, HK, D]
    kv_cache,  # [blocks, HK, block_size, 2 * D], for rows of earlier passes
    block_table,  # [n, most blocks] int32
    prefix_out,  # [T, HQ, D], attention to the prefix
    prefix_lse,  # [HQ, T] float32, log-sum-exp of its scores
    out,  # [T, HQ, D]
    sinks,  # [HQ]
    query_start_loc,
    masks,
    depths,
    prefix_lens,
    num_leading,
    strides,  # of rows and heads of query, key, value, prefix_out, out; of lse
    cache_strides,  # of blocks, heads and slots; and of block_table
    block_size,
    before,  # rows of earlier passes
    scale,
    softcap,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FROM_CACHE: tl.constexpr,  # all keys, as there are rows of earlier passes
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
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    weight = tl.exp(lse - top)
    total = weight
    if HAS_SINKS:
        total += tl.exp(sink - top)
    kept = tl.load(
        prefix_out + (at * strides[6] + head * strides[7])[:, None] + dim[None, :],
        mask=inside & has_prefix,
        other=0.0,
    )
    acc = kept.to(tl.float32) * weight[:, None]
    keys = queries + before
    prefix = tl.load(prefix_lens + req)
    place = _place(depths, at, row, leading, is_row)
    for first in range(0, keys, BLOCK_N):
        other = first + tl.arange(0, BLOCK_N)
        to, is_key = (begin + other).to(tl.int64), other < keys
        there = is_key[:, None] & (dim < D)[None, :]
        if FROM_CACHE:
            table = block_table + req * cache_strides[3]
            slot = _cache_slots(
                table, cache_strides, block_size, prefix + other, is_key
            )
            kv_at = (slot + head // GROUP * cache_strides[1])[:, None] + dim[None, :]
            k = tl.load(kv_cache + kv_at, mask=there, other=0.0)
            v = tl.load(kv_cache + kv_at + D, mask=there, other=0.0)
        else:
            of_head = head // GROUP * strides[3]
            k_at = (to * strides[2] + of_head)[:, None] + dim[None, :]
            of_head = head // GROUP * strides[5]
            v_at = (to * strides[4] + of_head)[:, None] + dim[None, :]
            k = tl.load(key + k_at, mask=there, other=0.0)
            v = tl.load(value + v_at, mask=there, other=0.0)
        scores = _scores(q, k, scale, softcap, SOFTCAP)
        seen = _sees(masks + (begin + leading) * 2, row, other, leading, is_row)
        if WINDOW > 0:
            if FROM_CACHE:
                key_place = other // queries
            else:
                key_place = _place(depths, to, other, leading, is_key)
            seen &= key_place[None, :] > place[:, None] - WINDOW
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
        top, total, acc = _add_keys(top, total, acc, scores, v)
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
    scores: Scores,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
) -> None:
    """Merges attention over prefixes with attention among the rows of the step.

    Args:
        query: [T, HQ, D]; T rows of the requests with trees.
        key, value: [at least T, HK, D], of this step.
        prefix_out: [T, HQ, D], attention of each row to its prefix alone.
        prefix_lse: [HQ, T] float32, log-sum-exp of the scores of that.
        out: [at least T, HQ, D], written.
        query_start_loc: [at least R + 1] int32.
        kv_cache, block_table: as of `attend_prefix`; read if there are rows of earlier
            passes.
    """
    heads, size = query.shape[1:]
    row_strides = [
        stride
        for tensor in (query, key, value, prefix_out, out)
        for stride in tensor.stride()[:2]
    ]
    block_m = 16 if tree.max_query_len <= 16 else 32
    rows = triton.next_power_of_2(tree.max_query_len)
    cache_strides = (*kv_cache.stride()[:3], block_table.stride(0))
    block_size = kv_cache.shape[2]
    _merge_tree_kernel[
        (tree.num_reqs, heads, triton.cdiv(tree.max_query_len, block_m))
    ](
        query,
        key,
        value,
        kv_cache,
        block_table,
        prefix_out,
        prefix_lse,
        out,
        query if scores.sinks is None else scores.sinks,
        query_start_loc,
        tree.rows.masks,
        tree.rows.depths,
        tree.rows.prefix_lens,
        tree.rows.num_leading,
        (*row_strides, *prefix_lse.stride()),
        cache_strides,
        block_size,
        tree.num_before,
        scores.scale,
        scores.softcap,
        WINDOW=scores.window,
        HAS_SINKS=scores.sinks is not None,
        FROM_CACHE=tree.num_before > 0,
        GROUP=heads // key.shape[1],
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_M=block_m,
        BLOCK_N=32 if tree.num_before else min(64, max(16, rows)),
        SOFTCAP=scores.softcap > 0,
        num_warps=4,
    )


@triton.jit
def _attend_prefix_kernel(
    query,  # [T, HQ, D]
    kv_cache,  # [blocks, HK, block_size, 2 * D]
    block_table,  # [n, most blocks] int32
    out,  # [T, HQ, D] contiguous
    lse,  # [HQ, T] float32
    query_start_loc,
    depths,
    prefix_lens,
    num_leading,
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
    WINDOW: tl.constexpr,
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
    start = 0
    if WINDOW > 0:
        # The first key that a row sees. Those of blocks before it may be freed.
        place = _place(depths, at, row, tl.load(num_leading + req), is_row)
        oldest = prefix + place - WINDOW + 1
        start = tl.maximum(tl.min(tl.where(is_row, oldest, prefix), 0), 0)
    for first in range(start, prefix, BLOCK_N):
        pos = first + tl.arange(0, BLOCK_N)
        is_key = pos < prefix
        table = block_table + req * table_stride
        slot = _cache_slots(table, cache_strides, block_size, pos, is_key)
        kv_at = slot[:, None] + dim[None, :]
        there = is_key[:, None] & (dim < D)[None, :]
        k = tl.load(cache + kv_at, mask=there, other=0.0)
        v = tl.load(cache + kv_at + D, mask=there, other=0.0)
        scores = _scores(q, k, scale, softcap, SOFTCAP)
        seen = is_key[None, :]
        if WINDOW > 0:
            seen &= pos[None, :] >= oldest[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        top, total, acc = _add_keys(top, total, acc, scores, v)
    some = tl.maximum(total, 1e-30)
    to = ((at * HEADS + head) * D)[:, None] + dim[None, :]
    tl.store(out + to, (acc / some[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * lse_stride + at, top + tl.log(some), mask=is_row)


def attend_prefix(
    query: torch.Tensor,
    query_start_loc: torch.Tensor,
    tree: TreeAttention,
    scores: Scores,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of rows to their prefixes, and its log-sum-exp.

    Args:
        query: [T, HQ, D], rows of the requests with trees.
        query_start_loc: [at least n + 1] int32.
        scores: without their sinks.
        kv_cache: [blocks, HK, block_size, 2 * D], K before V.
        block_table: [at least n, most blocks] int32.

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
        tree.rows.depths,
        tree.rows.prefix_lens,
        tree.rows.num_leading,
        query.stride()[:2],
        kv_cache.stride()[:3],
        block_table.stride(0),
        lse.stride(0),
        kv_cache.shape[2],
        scores.scale,
        scores.softcap,
        HEADS=heads,
        GROUP=heads // kv_cache.shape[1],
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_M=block_m,
        BLOCK_N=32,
        SOFTCAP=scores.softcap > 0,
        WINDOW=scores.window,
        num_warps=4,
    )
    return out, lse
