# SPDX-License-Identifier: Apache-2.0
"""Launches on a CPU: arguments and compilation."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton import knobs

from vllm.triton_utils import tl, triton
from vllm.triton_utils.cpu import compiler
from vllm.triton_utils.cpu.kernels import CpuKernel
from vllm.triton_utils.cpu.lowering import OPERATIONS
from vllm.triton_utils.cpu.values import Unsupported
from vllm.triton_utils.dispatcher import _rebind_kernels


@triton.jit
def _sum_kernel(x, out, count, scale=2.0, N: tl.constexpr = 8):
    i = tl.arange(0, N)
    total = tl.sum(tl.load(x + i, mask=i < count, other=0), axis=0)
    tl.store(out + tl.program_id(0), total * scale)


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> CpuKernel:
    """A kernel that has not been compiled yet."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return CpuKernel(_sum_kernel)


def launch(kernel: CpuKernel, dtype=torch.int32, grid=(1,), count=8, **more) -> float:
    """Launches the kernel; returns the sum of its first program."""
    out = torch.zeros(4)
    kernel.launch(grid, (torch.arange(8, dtype=dtype), out, count), more)
    return out[0].item()


def test_arguments(kernel):
    """Positional, by keyword, omitted, and options of the GPU compiler."""
    assert launch(kernel) == 56
    assert launch(kernel, scale=0.5, num_warps=4, num_stages=2) == 14
    assert launch(kernel, count=np.int64(3), N=4) == 6
    assert launch(kernel, grid=lambda arguments: (arguments["N"] // 8,)) == 56
    assert launch(kernel, grid=(0,)) == 0


def test_unsupported_argument_type(kernel):
    with pytest.raises(TypeError, match="a kernel on a CPU takes no str"):
        launch(kernel, count="8")


def test_compiled_per_types_and_constexprs(kernel):
    """Not per value, as on a GPU: the first 1 would compile while serving."""
    for count in (1, 2, 8, 16):
        launch(kernel, count=count)
    assert len(kernel.compiled) == 1
    assert launch(kernel, dtype=torch.int64) == launch(kernel, N=8) == 56
    assert launch(kernel, count=2**40) == 56
    assert len(kernel.compiled) == 3


def test_compiled_kernel_is_cached(kernel, monkeypatch):
    assert launch(kernel) == 56
    monkeypatch.delattr(compiler.machine, "compile_object")
    assert launch(CpuKernel(_sum_kernel)) == 56


def test_unsupported_operation_is_named(kernel, monkeypatch):
    monkeypatch.delitem(OPERATIONS, "tt.reduce")
    with pytest.raises(Unsupported, match="_sum_kernel cannot be compiled"):
        launch(kernel)


def test_rebind_kernels_with_llvmlite_loaded():
    """It inspects all modules' attributes; llvmlite's library has any attribute."""
    assert "llvmlite.binding.ffi" in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _rebind_kernels([])


def test_rebind_kernels_in_object_attributes(monkeypatch):
    owner = SimpleNamespace(kernel=(kernel := object()))
    monkeypatch.setattr(compiler, "owner", owner, raising=False)
    _rebind_kernels([(kernel, wrapper := object())])
    assert owner.kernel is wrapper
