# SPDX-License-Identifier: Apache-2.0
"""RMS norms of CPUs in C++: results, and which arguments the kernels take."""

import pytest
import torch

from vllm import ir
from vllm.config import CompilationConfig, VllmConfig
from vllm.config.compilation import CompilationMode
from vllm.kernels import cpu
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs a CPU")

EPS = 1e-6
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
RMS, ADD = ir.ops.rms_norm, ir.ops.fused_add_rms_norm


def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 16), (7, 256), (64, 896), (3, 4, 128)], ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_results(shape: tuple[int, ...], dtype: torch.dtype):
    x, residual = torch.randn(2, *shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    close = {"rtol": ROUNDING[dtype], "atol": 1e-6}

    normed = RMS.impls[cpu.PROVIDER].impl_fn(x.clone(), weight, EPS)
    torch.testing.assert_close(normed.double(), exact(x, weight), **close)

    total = x + residual
    fused = ADD.impls[cpu.PROVIDER].impl_fn
    normed, summed = fused(x.clone(), residual.clone(), weight, EPS)
    torch.testing.assert_close(summed, total, rtol=0, atol=0)
    # The kernel normalizes the sum before it is rounded.
    exact_sum = x.double() + residual.double()
    torch.testing.assert_close(normed.double(), exact(exact_sum, weight), **close)


ROWS = torch.randn(4, 64)
WEIGHT = torch.randn(64)
REFUSED = {
    "no weight": (ROWS, None, EPS),
    "other type": (ROWS, WEIGHT.bfloat16(), EPS),
    "part of a row": (ROWS, WEIGHT, EPS, 32),
    "no whole vectors": (ROWS[:, :40].contiguous(), WEIGHT[:40], EPS),
    "strided": (torch.randn(4, 2, 64)[:, 0], WEIGHT, EPS),
}


@pytest.mark.parametrize("args", REFUSED.values(), ids=REFUSED)
def test_dispatched_to_pytorch(args: tuple):
    x, *rest = args
    with RMS.set_priority([cpu.PROVIDER, "native"]):
        assert RMS.dispatch(*args).provider == "native"
        assert RMS.dispatch(ROWS, WEIGHT, EPS).provider == cpu.PROVIDER
    with ADD.set_priority([cpu.PROVIDER, "native"]):
        assert ADD.dispatch(x, x.clone(), *rest).provider == "native"


@pytest.mark.parametrize(
    "mode, first",
    [
        (CompilationMode.NONE, cpu.PROVIDER),
        (CompilationMode.DYNAMO_TRACE_ONCE, "native"),
    ],
)
def test_default(mode: CompilationMode, first: str):
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    for op in ("rms_norm", "fused_add_rms_norm"):
        assert getattr(config.kernel_config.ir_op_priority, op)[0] == first
