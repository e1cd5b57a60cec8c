# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings and SiLU with little Python, on a CPU where nothing is compiled.

What a layer calls follows from its class and the platform. Finding it out in each call
takes longer than rotating the few rows of a decode step of a small model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vllm.config import CompilationMode, get_current_vllm_config_or_none
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_LAYERS = "vllm.model_executor.layers"
_ROTARY = f"{_LAYERS}.rotary_embedding.base", {"RotaryEmbedding.forward_cpu"}
_SILU = (
    f"{_LAYERS}.activation",
    {"SiluAndMul.forward_cpu", "SiluAndMul.forward_native"},
)


def rotate_directly(rotary: "RotaryEmbedding") -> None:
    """Lets a new rotary embedding call its C++ kernel without further questions."""
    if not _is_plain(_ROTARY, type(rotary).forward_cpu):
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
    kind, has_kernel = type(activation), hasattr(activation, "op")
    if has_kernel or not _is_plain(_SILU, kind.forward_cpu, kind.forward_native):
        return
    silu = F.silu

    def forward(x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1] // 2
        return silu(x[..., :size]).mul_(x[..., size:])

    activation._forward_method = forward


def _is_plain(known: tuple[str, set[str]], *methods: Callable[..., Any]) -> bool:
    return (
        current_platform.is_cpu()
        and nothing_is_compiled()
        and all(is_vllms(method, *known) for method in methods)
    )


def nothing_is_compiled() -> bool:
    """Whether the engine that is being made runs layers as they are."""
    config = get_current_vllm_config_or_none()
    return config is not None and config.compilation_config.mode == CompilationMode.NONE


def is_vllms(method: Callable[..., Any], module: str, names: set[str]) -> bool:
    """Whether a method is one that vLLM defines in `module`: a subclass or a patch may
    do something else. By name, since a patch may be there before an import."""
    return method.__module__ == module and method.__qualname__ in names
