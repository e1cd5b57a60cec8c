# SPDX-License-Identifier: Apache-2.0
"""vLLM's C++ kernels of a CPU: as IR ops where nothing is compiled; and what they
cannot run if they are of an older release than the Python.

PyTorch runs a norm of a few rows as six to eight operations, which take ten times as
long as the kernel: a tenth of a decode step of a small model.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm import ir
from vllm.config.compilation import CompilationMode
from vllm.config.kernel import IrOpPriorityConfig
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

PROVIDER = "cpu_c"
LANES = 16  # the kernels take rows of whole vectors only; the widest have as many

current_platform.import_kernels()
_has_kernels = current_platform.is_cpu() and hasattr(torch.ops._C, "rms_norm")
if current_platform.is_cpu():
    # Linux grants AMX to processes that ask for it. oneDNN does with its first product
    # that is large enough, and vLLM's attention uses it in any case: a step of few rows
    # of a small model would be an illegal instruction.
    torch.cpu._init_amx()


def check_kernels(vllm_config: "VllmConfig") -> None:
    """Raises ValueError for models that need newer kernels; `[cpu.kernels]` in
    base.toml lists the outdated ops."""
    spec = vllm_config.speculative_config
    for config in (vllm_config.model_config, spec and spec.draft_model_config):
        if config is not None:
            _check_quantized_experts(config)


def _check_quantized_experts(config: "ModelConfig") -> None:
    """vLLM 0.33.0 passes the activation to this op; older kernels do not take it."""
    if not (config.quantization and config.is_moe):
        return
    op = getattr(torch.ops._C, "fused_experts_cpu", None)
    schema = op and op.default._schema
    if schema and all(argument.name != "act_method" for argument in schema.arguments):
        raise ValueError(
            f"{config.model} is a quantized mixture-of-experts model "
            f"({config.quantization}), which the CPU kernels of this build cannot run: "
            "they are of an older vLLM release. Serve it unquantized, or on a GPU."
        )


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
