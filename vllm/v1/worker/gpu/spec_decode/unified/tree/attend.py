# SPDX-License-Identifier: Apache-2.0
"""Attention of a step that verifies trees, and which backends and layers support it.

All rows of a request attend to the whole prefix, the keys before the rows. Among
themselves rows attend to their ancestors, by the masks of SpecInfer, arXiv 2305.09781,
and Medusa, arXiv 2401.10774. Draft passes that continue beams have ancestors in earlier
passes. All keys are read from the KV cache, where the step's own follow the prefix: as
later steps will read them, also in fp8.

One kernel attends to all of them, and serves every backend whose KV cache holds K and V
of a token side by side. FlashAttention is faster over a prefix, except in a layer with
a window, where a row's is given by the depth of its node. Then the kernel continues its
softmax, by the log-sum-exp of its scores, as Flash-Decoding does.

Matrix products have Triton's default precision, like those of vLLM's Triton attention,
which serves a request's other steps: for float32 that is TF32, unless
TRITON_F32_DEFAULT is "ieee". A higher precision here would make output depend on which
steps have trees. What is in fp8 is multiplied in the dtype of the output, which holds
it exactly.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vllm.config.drafter import first_of
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from .trees import TreeAttention

if current_platform.is_cpu():
    from . import cpu

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
# Of KV caches: as they are, and fp8 with the scales of a layer.
FORMATS = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


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
    scores, query = Scores.of(impl, layer), query[: tree.num_tokens]
    if current_platform.is_cpu():
        cpu.attend(layer, query, kv_cache, metadata, scores, output)
        return output
    if scores.scales is not None:
        kv_cache = kv_cache.view(current_platform.fp8_dtype())
    prefix, name = None, layer.attn_backend.get_name()
    if name == "FLASH_ATTN" and not scores.window:
        prefix = _flash_prefix(impl, query, kv_cache, metadata, scores)
    attend_rows(query, kv_cache, metadata, scores, output, prefix)
    return output


class Scores(NamedTuple):
    """How a layer weighs keys.

    Attributes:
        scale: of the products of queries and keys.
        softcap: of the scores; 0.0 leaves them uncapped.
        window: how many tokens a row attends to, itself included; 0: all before it.
        sinks: [HQ], of each head a score without a value; None: none.
        scales: what queries, if they are in fp8, and the K and V of an fp8 KV cache are
            to be multiplied by: [HK] or one for all heads, float32. None: nothing.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def of(cls, impl: Any, layer: Any) -> "Scores":
        """Those of a layer and its backend's implementation."""
        window, scales = impl.sliding_window, None
        if isinstance(window, tuple):  # tokens before the row
            window = window[0] + 1
        if get_kv_quant_mode(impl.kv_cache_dtype) != KVQuantMode.NONE:
            scales = layer._q_scale, layer._k_scale, layer._v_scale
        softcap, sinks = impl.logits_soft_cap, impl.sinks
        return cls(impl.scale, softcap, max(window or 0, 0), sinks, scales)


def _flash_prefix(
    impl: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention of rows to their prefixes; see `attend_rows`."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    tree: TreeAttention = metadata.draft_tree
    n, heads = tree.num_reqs, kv_cache.shape[1]
    # Hopper's loads do not support some strides of a single head.
    keys, values = map(
        canonicalize_singleton_dim_strides,
        kv_cache.transpose(1, 2).split(query.shape[2], dim=-1),
    )
    q_descale, k_descale, v_descale = (
        None if scale is None else scale.expand(n, heads)
        for scale in scores.scales or (None, None, None)
    )
    return flash_attn_varlen_func(
        q=query,
        k=keys,
        v=values,
        cu_seqlens_q=metadata.query_start_loc[: n + 1],
        max_seqlen_q=tree.max_query_len,
        seqused_k=tree.rows.prefix_lens[:n],
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=scores.scale,
        causal=False,
        block_table=metadata.block_table[:n],
        softcap=scores.softcap,
        return_softmax_lse=True,
        fa_version=impl.vllm_flash_attn_version,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def why_layer_cannot(layer: Any) -> str | None:
    """Why a layer does not support tree attention; None if it does."""
    impl = getattr(layer, "impl", None)
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend else type(layer).__name__
    if name not in BACKENDS or getattr(impl, "head_size_v", None):
        return f"attention by {name}"
    if isinstance(layer, Attention) and type(layer) is not Attention:
        # Its metadata may be of other requests and rows than the step's.
        return f"attention by {type(layer).__name__}"
    if name == "CPU_ATTN" and (reason := cpu.why_not_loaded()):
        return reason
    reasons = {
        "ALiBi": impl.alibi_slopes is not None,
        "chunked attention": getattr(impl, "chunk_lookback", -1) > -1,
        "logits soft cap on a CPU": name == "CPU_ATTN" and impl.logits_soft_cap,
        f"a KV cache in {impl.kv_cache_dtype}": get_kv_quant_mode(impl.kv_cache_dtype)
        not in FORMATS,
        "encoder attention": impl.attn_type != AttentionType.DECODER,
        "FlashAttention 4": getattr(impl, "vllm_flash_attn_version", 0) == 4,
    }
    return first_of(reasons)


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
def _keys_at(cache, table, strides, block_size, position, is_key, q, D: tl.constexpr):
    """[N, BLOCK_D] each, in the dtype of `q`: K and V at positions of a request."""
    page = tl.load(table + position // block_size, mask=is_key, other=0).to(tl.int64)
    slot = page * strides[0] + position % block_size * strides[2]
    dim = tl.arange(0, q.shape[1])
    at = cache + slot[:, None] + dim[None, :]
    there = is_key[:, None] & (dim < D)[None, :]
    k = tl.load(at, mask=there, other=0.0).to(q.dtype)
    return k, tl.load(at + D, mask=there, other=0.0).to(q.dtype)


@triton.jit(do_not_specialize=["num_tokens", "before"])
def _attend_rows_kernel(
    query,  # [T, HQ, D]
    kv_cache,  # [blocks, HK, block_size, 2 * D]
    block_table,  # [n, most blocks] int32
    prefix_out,  # [T, HQ, D], attention to the prefix
    prefix_lse,  # [HQ, T] float32, log-sum-exp of its scores
    out,  # [T, HQ, D]
    sinks,  # [HQ]
    scales,  # of queries, keys and values: [HK] float32 each
    query_start_loc,
    masks,
    depths,
    prefix_lens,
    num_leading,
    strides,  # of rows and heads of query, prefix_out and out
    cache_strides,  # of blocks, heads and slots; of block_table
    scale_strides,
    block_size,
    num_tokens,  # T
    before,  # rows of earlier passes
    scale,
    softcap,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_PREFIX: tl.constexpr,  # attention to it is given
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
    leading, prefix = tl.load(num_leading + req), tl.load(prefix_lens + req)
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row, at = row < queries, (begin + row).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    inside = is_row[:, None] & (dim < D)[None, :]
    q_at = (at * strides[0] + head * strides[1])[:, None] + dim[None, :]
    q = tl.load(query + q_at, mask=inside, other=0.0).to(out.dtype.element_ty)
    place = _place(depths, at, row, leading, is_row)
    kv_head, of_values = head // GROUP, 1.0
    if HAS_SCALES:
        scale *= tl.load(scales[1] + kv_head * scale_strides[1])
        of_values = tl.load(scales[2] + kv_head * scale_strides[2])
        if query.dtype.element_ty.is_fp8():
            scale *= tl.load(scales[0] + kv_head * scale_strides[0])
    cache = kv_cache + kv_head * cache_strides[1]
    table = block_table + req * cache_strides[3]

    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32)
        total += 1.0
    if HAS_PREFIX:
        lse_at = prefix_lse + head * num_tokens + at
        there = is_row & (prefix > 0)
        lse = tl.load(lse_at, mask=there, other=float("-inf"))
        new_top = tl.maximum(top, lse)
        weight = tl.exp(lse - new_top)
        total, top = total * tl.exp(top - new_top) + weight, new_top
        kept_at = (at * strides[2] + head * strides[3])[:, None] + dim[None, :]
        kept = tl.load(prefix_out + kept_at, mask=inside & (prefix > 0), other=0.0)
        acc += kept.to(tl.float32) * (weight / of_values)[:, None]
    else:
        start = 0
        if WINDOW > 0:
            # The first key that a row sees. Those of blocks before it may be freed.
            oldest = prefix + place - WINDOW + 1
            start = tl.maximum(tl.min(tl.where(is_row, oldest, prefix), 0), 0)
        for first in range(start, prefix, BLOCK_N):
            pos = first + tl.arange(0, BLOCK_N)
            is_key = pos < prefix
            k, v = _keys_at(cache, table, cache_strides, block_size, pos, is_key, q, D)
            scores = _scores(q, k, scale, softcap, SOFTCAP)
            seen = is_key[None, :]
            if WINDOW > 0:
                seen &= pos[None, :] >= oldest[:, None]
            scores = tl.where(seen, scores, float("-inf"))
            top, total, acc = _add_keys(top, total, acc, scores, v)
    keys = queries + before
    for first in range(0, keys, BLOCK_N):
        other = first + tl.arange(0, BLOCK_N)
        is_key, pos = other < keys, prefix + other
        k, v = _keys_at(cache, table, cache_strides, block_size, pos, is_key, q, D)
        scores = _scores(q, k, scale, softcap, SOFTCAP)
        seen = _sees(masks + (begin + leading) * 2, row, other, leading, is_row)
        if WINDOW > 0:
            of_node = is_key & (before == 0)
            of_key = _place(depths, begin + other, other, leading, of_node)
            of_key = tl.where(before > 0, other // queries, of_key)  # of its pass
            seen &= of_key[None, :] > place[:, None] - WINDOW
        scores = tl.where(seen & is_key[None, :], scores, float("-inf"))
        top, total, acc = _add_keys(top, total, acc, scores, v)
    acc = acc * of_values / total[:, None]
    to = (at * strides[4] + head * strides[5])[:, None] + dim[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside)


def block_sizes(tree: TreeAttention, has_prefix: bool) -> tuple[int, int]:
    """Rows and keys of a program: by the trees, whatever prompts are beside them, since
    a kernel of other sizes would be compiled while serving."""
    rows = tree.max_tree_len
    is_step = has_prefix and not tree.num_before
    keys = min(64, max(16, triton.next_power_of_2(rows))) if is_step else 32
    return 16 if rows <= 16 else 32, keys


def attend_rows(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Any,
    scores: Scores,
    out: torch.Tensor,
    prefix: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Attention of the rows of the requests with trees.

    Args:
        query: [T, HQ, D], these rows.
        kv_cache: [blocks, HK, block_size, 2 * D], K before V; the step's written.
        metadata: the backend's, with query_start_loc [at least n + 1] int32,
            block_table [at least n, most blocks] int32, and draft_tree.
        out: [at least T, HQ, D], written.
        prefix: attention of each row to its prefix alone, without sinks, [T, HQ, D],
            and the log-sum-exp of its scores, contiguous [HQ, T] float32; what they are
            for rows without a prefix does not matter. None: to be computed.
    """
    tree: TreeAttention = metadata.draft_tree
    (num_tokens, heads, size), kv_heads = query.shape, kv_cache.shape[1]
    assert kv_cache.stride(3) == 1 and kv_cache.shape[3] == 2 * size
    prefix_out, prefix_lse = prefix or (out, out[0])
    assert prefix is None or prefix_lse.is_contiguous()
    of_rows = (tensor.stride()[:2] for tensor in (query, prefix_out, out))
    strides = tuple(itertools.chain(*of_rows))
    scales = [s.expand(kv_heads) for s in scores.scales or (out[0, 0, :1],) * 3]
    block_m, block_n = block_sizes(tree, prefix is not None)
    blocks = triton.cdiv(tree.max_query_len, block_m)
    _attend_rows_kernel[(tree.num_reqs, heads, blocks)](
        query,
        kv_cache,
        metadata.block_table,
        prefix_out,
        prefix_lse,
        out,
        query if scores.sinks is None else scores.sinks,
        tuple(scales),
        metadata.query_start_loc,
        tree.rows.masks,
        tree.rows.depths,
        tree.rows.prefix_lens,
        tree.rows.num_leading,
        strides,
        (*kv_cache.stride()[:3], metadata.block_table.stride(0)),
        tuple(s.stride(0) for s in scales),
        kv_cache.shape[2],
        num_tokens,
        tree.num_before,
        scores.scale,
        scores.softcap,
        WINDOW=scores.window,
        HAS_SINKS=scores.sinks is not None,
        HAS_SCALES=scores.scales is not None,
        HAS_PREFIX=prefix is not None,
        GROUP=heads // kv_heads,
        D=size,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SOFTCAP=scores.softcap > 0,
        num_warps=4,
    )
