# SPDX-License-Identifier: Apache-2.0
"""RMS norms of CPUs in C++: results, and which arguments the kernels take."""

from types import SimpleNamespace

import pytest
import torch

from vllm import ir
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.kernels import cpu
from vllm.model_executor.layers.layernorm import RMSNorm
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


class OtherNorm(RMSNorm):
    def forward_native(self, x, residual=None):
        return 2 * x


def made(
    kind=RMSNorm, mode=CompilationMode.NONE, priority=None, size=64, **given
) -> RMSNorm:
    config = VllmConfig(compilation_config=CompilationConfig(mode=mode))
    if priority is not None:
        config.kernel_config.ir_op_priority.rms_norm = priority
    with set_current_vllm_config(config):
        norm = kind(size, EPS, **given)
    if norm.has_weight:
        norm.weight.data = torch.randn(size)
    return norm


def is_direct(norm: RMSNorm) -> bool:
    return not hasattr(norm._forward_method, "__self__")  # a bound method has it


@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)], ids=str)
def test_direct_calls_equal_the_op(shape: tuple[int, ...]):
    norm = made()
    assert is_direct(norm)
    x, residual = torch.randn(2, *shape)
    kernel = {op: op.impls[cpu.PROVIDER].impl_fn for op in (RMS, ADD)}
    assert torch.equal(norm(x), kernel[RMS](x, norm.weight.data, EPS))
    expected = kernel[ADD](x.clone(), residual.clone(), norm.weight.data, EPS)
    for found, wanted in zip(norm(x, residual), expected, strict=True):
        assert torch.equal(found, wanted)


def test_replaced_weights_count():
    norm = made()
    norm.weight = torch.nn.Parameter(2 * norm.weight.data, False)
    expected = RMS.impls[cpu.PROVIDER].impl_fn(ROWS, norm.weight.data, EPS)
    assert torch.equal(norm(ROWS), expected)


@pytest.mark.parametrize(
    "x",
    [torch.randn(4, 2, 64)[:, 0], torch.randn(4, 64).bfloat16()],
    ids=["strided", "other type"],
)
def test_rows_that_the_kernels_refuse_go_through_the_op(x: torch.Tensor):
    norm, residual = made(), torch.zeros_like(x)
    with RMS.set_priority(["native"]), ADD.set_priority(["native"]):
        native = norm.forward_native(x)
        assert torch.equal(norm(x), native)
        assert torch.equal(norm(x, residual)[0], native)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": OtherNorm},
        {"mode": CompilationMode.DYNAMO_TRACE_ONCE},
        {"priority": ["native"]},
        {"size": 40},
        {"has_weight": False},
        {"var_hidden_size": 32},
    ],
    ids=str,
)
def test_other_norms_go_through_the_op(given: dict):
    assert not is_direct(made(**given))


def test_patched_norms_go_through_the_op(monkeypatch):
    monkeypatch.setattr(RMSNorm, "forward_native", lambda self, x, residual=None: x)
    assert made()(ROWS) is ROWS


def test_stand_in_configs_need_no_priorities(monkeypatch):
    """Tests of a model's layers may set any object as vLLM's config."""
    config = SimpleNamespace(kernel_config=SimpleNamespace())
    monkeypatch.setattr(cpu, "get_current_vllm_config_or_none", lambda: config)
    norm = made()
    usual = norm._forward_method
    cpu.call_directly(norm)
    assert norm._forward_method == usual
