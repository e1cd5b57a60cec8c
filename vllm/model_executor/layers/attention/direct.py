# SPDX-License-Identifier: Apache-2.0
"""Attention layers of a CPU that call their kernels directly.

`Attention` reaches them through two functions that a compiler takes for opaque
operations. Each looks the layer up by its name, and its metadata, KV cache and slots;
then the implementation splits the KV cache into keys and values. Where nothing is
compiled the layer is at hand, and its keys and values stay where they are.
"""

from typing import TYPE_CHECKING

import torch

from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention

_CPU_MODULE = "vllm.v1.attention.backends.cpu_attn"


def call_directly(layer: "Attention") -> None:
    """Gives a layer a `forward` of its own, once its weights are loaded."""
    vars(layer).pop("forward", None)
    if not _is_plain(layer):
        return
    name, impl, usual = layer.layer_name, layer.impl, layer.forward
    of_query = -1, layer.num_heads, layer.head_size
    of_key = -1, layer.num_kv_heads, layer.head_size
    width = layer.num_heads * layer.head_size
    update = torch.ops._C.cpu_attn_reshape_and_cache.default
    attend = torch.ops._C.cpu_attention_with_kv_cache.default
    kind, own = type(impl), vars(impl)
    known = kind.forward, kind.do_kv_cache_update
    split, halves = None, ()

    def forward(
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        nonlocal split, halves
        context, rows = get_forward_context(), query.shape[0]
        metadata, slots = context.attn_metadata, context.slot_mapping
        if (
            type(metadata) is not dict
            or type(slots) is not dict
            or key is None
            or value is None
            or output_shape is not None
            or output_dtype is not None
            or (mine := metadata[name]).num_actual_tokens != rows
            # Implementations may be patched at any time.
            or (kind.forward, kind.do_kv_cache_update) != known
            or "forward" in own
            or "do_kv_cache_update" in own
        ):
            return usual(query, key, value, output_shape, output_dtype)
        if (cache := layer.kv_cache) is not split:
            split, halves = cache, _keys_and_values(cache)
        scales = layer._k_scale_float, layer._v_scale_float, impl.kv_cache_dtype
        query, key, value = query.view(of_query), key.view(of_key), value.view(of_key)
        if (to := slots.get(name)) is not None:
            update(key, value, *halves, to, layer.isa, *scales)
        output = torch.empty((rows, width), dtype=query.dtype)
        if mine.draft_tree is not None:
            of_rows = output.view(of_query)
            impl.forward(layer, query, key, value, cache, mine, output=of_rows)
            return output
        attend(
            query,
            *halves,
            output.view(of_query),
            mine.query_start_loc,
            mine.seq_lens,
            impl.scale,
            mine.causal,
            impl.alibi_slopes,
            impl.sliding_window,
            mine.block_table,
            impl.logits_soft_cap,
            mine.scheduler_metadata,
            impl.sinks,
            mine.dynamic_causal,
            *scales,
        )
        return output

    layer.forward = forward


def _keys_and_values(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of [blocks, heads, block_size, 2 * head_size], as the kernels take them."""
    blocks, heads, block_size, _ = cache.shape
    return cache.view(blocks, heads, 2 * block_size, -1).chunk(2, dim=2)


def _is_plain(layer: "Attention") -> bool:
    config = get_current_vllm_config_or_none()
    return (
        current_platform.is_cpu()
        and config is not None
        and config.kv_transfer_config is None
        and layer.use_direct_call
        and layer.query_quant is None
        and layer.kv_sharing_target_layer_name is None
        and layer.head_size_v == layer.head_size
        # A subclass or a patch may do something else.
        and type(layer).forward.__qualname__ == "Attention.forward"
        and type(layer).forward.__module__.endswith("layers.attention.attention")
        and _has_plain_impl(layer.impl)
    )


def _has_plain_impl(impl: object) -> bool:
    kind = type(impl)
    methods = getattr(kind, "forward", None), getattr(kind, "do_kv_cache_update", None)
    return (
        all(getattr(method, "__module__", None) == _CPU_MODULE for method in methods)
        and impl.attn_type == AttentionType.DECODER
        # The implementation converts others when it is first called.
        and (impl.sinks is None or impl.sinks.dtype in (torch.bfloat16, torch.float32))
    )
