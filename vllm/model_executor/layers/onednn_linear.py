# SPDX-License-Identifier: Apache-2.0
"""Linear layers that call oneDNN directly, on a CPU where nothing is compiled.

Between `nn.Module.__call__` and the kernel a linear layer makes eight Python calls. For
the few rows of a decode step of a small model they take as long as the kernel itself.
"""

from typing import Any

import torch
import torch.nn as nn

from vllm.model_executor.layers.direct_ops import is_vllms, nothing_is_compiled
from vllm.model_executor.layers.linear import LinearBase

# Only what vLLM itself defines is replaced.
_FORWARDS = {
    "ColumnParallelLinear.forward",
    "ReplicatedLinear.forward",
    "RowParallelLinear.forward",
}
_APPLY = {"UnquantizedLinearMethod.apply"}


def call_directly(layer: nn.Module, handler: Any) -> None:
    """Gives a linear layer a `forward` of its own, once its weights are packed.

    Args:
        handler: vLLM's `CPUDNNLGEMMHandler` of the packed weights.
    """
    if not _is_plain(layer):
        return
    multiply, empty = torch.ops._C.onednn_mm.default, torch.empty
    packed, size, width = handler.handler_tensor, handler.n, handler.k
    # Read in each call: weights may be loaded again.
    parameters = layer._parameters
    skips_bias, returns_bias = layer.skip_bias_add, layer.return_bias

    def forward(x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Any]:
        bias = parameters["bias"]
        output = empty((*x.shape[:-1], size), dtype=x.dtype)
        rows = x if x.dim() == 2 else x.reshape(-1, width)
        multiply(output, rows, None if skips_bias else bias, packed)
        if not returns_bias:
            return output
        return output, bias if skips_bias else None

    layer.forward = forward


def call_as_usual(layer: nn.Module) -> None:
    """Undoes `call_directly`, whose weights are about to be packed anew."""
    vars(layer).pop("forward", None)


def _is_plain(layer: nn.Module) -> bool:
    module = LinearBase.__module__
    return (
        nothing_is_compiled()
        and isinstance(layer, LinearBase)
        and "bias" in layer._parameters
        and layer.tp_size == 1
        and is_vllms(type(layer).forward, module, _FORWARDS)
        and is_vllms(type(layer.quant_method).apply, module, _APPLY)
    )
