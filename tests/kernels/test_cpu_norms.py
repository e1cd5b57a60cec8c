# SPDX-License-Identifier: Apache-2.0
"""C++ kernels of CPUs: RMS norms, and models that older kernels cannot run."""

from types import SimpleNamespace

import pytest
import torch

from tools.overlay.base import load_config
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


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("is_old", [False, True])
def test_old_kernels_refuse_quantized_experts(is_draft, is_old, monkeypatch):
    """Before weights load, whether target or drafter has them."""
    names = ["out", "w1", *(["act_method"] * (not is_old))]
    schema = SimpleNamespace(arguments=[SimpleNamespace(name=n) for n in names])
    op = SimpleNamespace(default=SimpleNamespace(_schema=schema))
    monkeypatch.setattr(torch.ops._C, "fused_experts_cpu", op, raising=False)
    models = [
        SimpleNamespace(model="a/model", quantization=quantization, is_moe=is_moe)
        for quantization, is_moe in (("mxfp4", True), ("mxfp4", False), (None, True))
    ]
    for model in models:
        pair = (models[1], model) if is_draft else (model, models[1])
        spec = SimpleNamespace(draft_model_config=pair[1])
        config = SimpleNamespace(model_config=pair[0], speculative_config=spec)
        if is_old and model is models[0]:
            with pytest.raises(ValueError, match="a/model is a quantized mixture"):
                cpu.check_kernels(config)
        else:
            cpu.check_kernels(config)


def test_only_what_is_refused_is_outdated():
    outdated = load_config()["cpu"].get("kernels", {}).get("outdated", [])
    assert set(outdated) <= {"fused_experts_cpu"}
