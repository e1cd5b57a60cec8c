# SPDX-License-Identifier: Apache-2.0
"""Attention layers of a CPU that call their implementation directly.

`Attention` calls it through two functions that a compiler takes for opaque operations.
Each looks the layer up by its name, and its metadata, KV cache and slots. Where nothing
is compiled the layer is at hand, and one look is enough.
"""

from typing import TYPE_CHECKING

import torch

from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention.attention import Attention


def call_directly(layer: "Attention") -> None:
    """Gives a layer a `forward` of its own, once its weights are loaded."""
    vars(layer).pop("forward", None)
    if not _is_plain(layer):
        return
    name, impl, usual = layer.layer_name, layer.impl, layer.forward
    of_query = -1, layer.num_heads, layer.head_size
    of_key = -1, layer.num_kv_heads, layer.head_size
    of_value = -1, layer.num_kv_heads, layer.head_size_v
    of_output = -1, layer.num_heads, layer.head_size_v
    width = layer.num_heads * layer.head_size_v

    def forward(
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        context = get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        has_metadata = type(metadata) is dict and type(slots) is dict
        has_all = has_metadata and key is not None and value is not None
        if not has_all or output_shape is not None or output_dtype is not None:
            return usual(query, key, value, output_shape, output_dtype)
        output = torch.empty((query.shape[0], width), dtype=query.dtype)
        query, cache = query.view(of_query), layer.kv_cache
        key, value = key.view(of_key), value.view(of_value)
        if (own_slots := slots.get(name)) is not None:
            impl.do_kv_cache_update(layer, key, value, cache, own_slots)
        rows = output.view(of_output)
        impl.forward(layer, query, key, value, cache, metadata[name], output=rows)
        return output

    layer.forward = forward


def _is_plain(layer: "Attention") -> bool:
    config = get_current_vllm_config_or_none()
    return (
        current_platform.is_cpu()
        and config is not None
        and config.kv_transfer_config is None
        and layer.use_direct_call
        and layer.query_quant is None
        and layer.kv_sharing_target_layer_name is None
        and not layer.attn_backend.forward_includes_kv_cache_update
        # A subclass or a patch may do something else.
        and type(layer).forward.__qualname__ == "Attention.forward"
        and type(layer).forward.__module__.endswith("layers.attention.attention")
    )
