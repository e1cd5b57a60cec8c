# SPDX-License-Identifier: Apache-2.0
"""IR ops for CPUs: vLLM's C++ kernels where nothing is compiled.

PyTorch runs a norm of a few rows as six to eight operations, which take ten times as
long as the kernel: a tenth of a decode step of a small model.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm import ir
from vllm.config import get_current_vllm_config_or_none
from vllm.config.compilation import CompilationMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.layernorm import RMSNorm

PROVIDER = "cpu_c"
LANES = 16  # the kernels take rows of whole vectors only; the widest have as many

current_platform.import_kernels()
_has_kernels = current_platform.is_cpu() and hasattr(torch.ops._C, "rms_norm")
if current_platform.is_cpu():
    # Linux grants AMX to processes that ask for it. oneDNN does with its first product
    # that is large enough, and vLLM's attention uses it in any case: a step of few rows
    # of a small model would be an illegal instruction.
    torch.cpu._init_amx()


def op_priority(vllm_config: "VllmConfig") -> IrOpPriorityConfig:
    """Inductor fuses PyTorch's operations; elsewhere the kernels are faster."""
    compiles = vllm_config.compilation_config.mode != CompilationMode.NONE
    norm = ["native"] if compiles or not _has_kernels else [PROVIDER, "native"]
    return IrOpPriorityConfig.with_default(
        ["native"], rms_norm=norm, fused_add_rms_norm=norm
    )


def _is_supported(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return (
        variance_size is None
        and weight is not None
        and weight.dtype == x.dtype
        and x.shape[-1] % LANES == 0
        and x.is_contiguous()
    )


def _is_supported_with_residual(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return (
        _is_supported(x, weight, epsilon, variance_size)
        and x_residual.dtype == x.dtype
        and x_residual.is_contiguous()
    )


@ir.ops.rms_norm.register_impl(
    PROVIDER, supports_args=_is_supported, supported=_has_kernels
)
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """[..., N]; the product with the weight is rounded once, in the type of `x`."""
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


@ir.ops.fused_add_rms_norm.register_impl(
    PROVIDER,
    supports_args=_is_supported_with_residual,
    supported=_has_kernels,
    inplace=True,
)
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[..., N] each; returns the normalized sum and the sum, in place of both."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def call_directly(norm: "RMSNorm") -> None:
    """Lets a new norm call its kernel without asking the IR op which implementation to
    use, if it would use the kernel: asking takes longer than a few rows."""
    if not _is_plain(norm):
        return
    normalize = torch.ops._C.rms_norm.default
    add_and_normalize = torch.ops._C.fused_add_rms_norm.default
    usual, parameters = norm._forward_method, norm._parameters
    epsilon = norm.variance_epsilon

    def forward(x: Tensor, residual: Tensor | None = None) -> Any:
        weight = parameters["weight"]
        if weight.dtype != x.dtype or not x.is_contiguous():
            return usual(x, residual)
        if residual is None:
            output = torch.empty_like(x)
            normalize(output, x, weight, epsilon)
            return output
        if residual.dtype != x.dtype or not residual.is_contiguous():
            return usual(x, residual)
        add_and_normalize(x, residual, weight, epsilon)
        return x, residual

    norm._forward_method = forward


def _is_plain(norm: "RMSNorm") -> bool:
    config = get_current_vllm_config_or_none()
    if config is None or not norm.has_weight or norm.hidden_size % LANES:
        return False
    # Not there in a config that stands in for vLLM's, as in tests of a model's layers.
    priority = getattr(config.kernel_config, "ir_op_priority", None)
    if priority is None:
        return False
    first = {*priority.rms_norm[:1], *priority.fused_add_rms_norm[:1]}
    kind = type(norm)
    # A subclass or a patch may do something else.
    return (
        first == {PROVIDER}
        and norm.variance_size_override is None
        and kind.forward_native.__module__ == "vllm.model_executor.layers.layernorm"
        and kind.forward_cpu.__module__ == "vllm.model_executor.custom_op"
    )
