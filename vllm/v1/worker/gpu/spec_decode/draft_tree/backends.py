# SPDX-License-Identifier: Apache-2.0
"""Attention backends that support trees, and what a layer needs for it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .attention import merge_tree
from .prefix import attend_prefix
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
    merge_tree(
        query,
        key,
        value,
        prefix_out,
        prefix_lse,
        output,
        metadata.query_start_loc,
        tree,
        impl.scale,
        impl.logits_soft_cap,
    )


def _attend_triton(impl, layer, query, key, value, kv_cache, metadata, output) -> None:
    tree: TreeAttention = metadata.draft_tree
    query = query[: tree.num_tokens]
    scores = (metadata.query_start_loc, tree, impl.scale, impl.logits_soft_cap)
    prefix = attend_prefix(query, kv_cache, metadata.block_table, *scores)
    merge_tree(query, key, value, *prefix, output, *scores)


def _attend_cpu(*args) -> None:
    from .cpu import attend

    attend(*args)


ATTEND: dict[str, Callable[..., None]] = {
    "FLASH_ATTN": _attend_flash,
    "TRITON_ATTN": _attend_triton,
    "CPU_ATTN": _attend_cpu,
}


def why_layer_cannot(layer: Any) -> str | None:
    """Why a layer does not support tree attention; None if it does."""
    impl = getattr(layer, "impl", None)
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend else type(layer).__name__
    if name not in ATTEND or getattr(impl, "head_size_v", None):
        return f"attention by {name}"
    window = impl.sliding_window
    reasons = {
        "attention windows": window not in (None, -1, (-1, -1)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "ALiBi": impl.alibi_slopes is not None,
        "logits soft cap on a CPU": name == "CPU_ATTN" and impl.logits_soft_cap,
        "a quantized KV cache": is_quantized_kv_cache(impl.kv_cache_dtype),
        "encoder attention": impl.attn_type != AttentionType.DECODER,
        "FlashAttention 4": getattr(impl, "vllm_flash_attn_version", 0) == 4,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
