# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings and SiLU with little Python, on a CPU where nothing is compiled.

What a layer calls follows from its class and the platform. Finding it out in each call
takes longer than rotating the few rows of a decode step of a small model.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def rotate_directly(rotary: "RotaryEmbedding") -> None:
    """Lets a new rotary embedding call its C++ kernel without further questions."""
    if not _is_plain(rotary, "RotaryEmbedding", "forward_cpu"):
        return
    rotate = torch.ops._C.rotary_embedding.default
    usual, buffers = rotary._forward_method, rotary._buffers
    size, is_neox_style = rotary.head_size, rotary.is_neox_style

    def forward(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = buffers.get("cos_sin_cache")
        if query.dim() != 2 or cache is None or cache.dtype != query.dtype:
            return usual(positions, query, key)
        rotate(positions, query, key, size, cache, is_neox_style)
        return query, key

    rotary._forward_method = forward


def activate_directly(activation: "SiluAndMul") -> None:
    """Lets a new SiluAndMul call PyTorch's operations at once, the second in place."""
    has_kernel = hasattr(activation, "op")
    if has_kernel or not _is_plain(
        activation, "SiluAndMul", "forward_cpu", "forward_native"
    ):
        return
    silu = F.silu

    def forward(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // 2
        return silu(x[..., :size]).mul_(x[..., size:])

    activation._forward_method = forward


def _is_plain(op: "CustomOp", name: str, *methods: str) -> bool:
    config = get_current_vllm_config_or_none()
    return (
        current_platform.is_cpu()
        and config is not None
        and config.compilation_config.mode == CompilationMode.NONE
        and all(_is_vllms(getattr(type(op), method), name) for method in methods)
    )


def _is_vllms(method: Any, name: str) -> bool:
    """Whether it is vLLM's own, of the class `name`: a subclass or a patch may do
    something else."""
    return (
        method.__module__.startswith("vllm.model_executor.layers.")
        and method.__qualname__ == f"{name}.{method.__name__}"
    )
