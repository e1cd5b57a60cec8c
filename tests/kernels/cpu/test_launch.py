# SPDX-License-Identifier: Apache-2.0
"""What a launch on a CPU takes, when it compiles, and what it does if it cannot."""

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from triton import knobs

from vllm.triton_utils import tl, triton
from vllm.triton_utils.cpu import compiler, kernels
from vllm.triton_utils.cpu.kernels import CpuKernel
from vllm.triton_utils.cpu.lowering import OPERATIONS
from vllm.triton_utils.dispatcher import _rebind_kernels


@triton.jit
def _sum_kernel(x, out, count, scale=2.0, N: tl.constexpr = 8):
    i = tl.arange(0, N)
    total = tl.sum(tl.load(x + i, mask=i < count, other=0), axis=0)
    tl.store(out + tl.program_id(0), total * scale)


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> CpuKernel:
    """That nothing has been compiled for."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    return CpuKernel(_sum_kernel)


def launch(kernel: CpuKernel, dtype=torch.int32, grid=(1,), count=8, **more) -> float:
    """The sum that the first program finds."""
    out = torch.zeros(4)
    kernel.launch(grid, (torch.arange(8, dtype=dtype), out, count), more)
    return out[0].item()


def test_arguments(kernel):
    """By position, by name, left out, and those for a GPU's compiler."""
    assert launch(kernel) == 56
    assert launch(kernel, scale=0.5, num_warps=4, num_stages=2) == 14
    assert launch(kernel, count=np.int64(3), N=4) == 6
    assert launch(kernel, grid=lambda arguments: (arguments["N"] // 8,)) == 56
    assert launch(kernel, grid=(0,)) == 0


def test_an_argument_of_no_known_type(kernel):
    with pytest.raises(TypeError, match="a kernel on a CPU takes no str"):
        launch(kernel, count="8")


def test_it_is_compiled_for_types_and_constexprs(kernel):
    """Not for numbers, as on a GPU: a 1 would be compiled in the midst of serving."""
    for count in (1, 2, 8, 16):
        launch(kernel, count=count)
    assert len(kernel.compiled) == 1
    assert launch(kernel, dtype=torch.int64) == launch(kernel, N=8) == 56
    assert launch(kernel, count=2**40) == 56
    assert len(kernel.compiled) == 3


def test_the_next_process_compiles_nothing(kernel, monkeypatch):
    assert launch(kernel) == 56
    monkeypatch.delattr(compiler.machine, "compile_object")
    assert launch(CpuKernel(_sum_kernel)) == 56


def test_what_is_not_compiled_is_interpreted(kernel, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(
        kernels.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    monkeypatch.delitem(OPERATIONS, "tt.reduce")
    assert launch(kernel) == launch(kernel, count=8) == 56
    (line,) = lines
    assert "kernel _sum_kernel is interpreted on the CPU" in line
    assert "tt.reduce is not compiled there" in line


def test_vllm_takes_the_place_of_kernels_beside_a_compiler():
    """It looks at what all modules hold; llvmlite's library has any attribute."""
    assert "llvmlite.binding.ffi" in sys.modules
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _rebind_kernels([])


def test_kernels_are_found_where_objects_keep_them(monkeypatch):
    owner = SimpleNamespace(kernel=(kernel := object()))
    monkeypatch.setattr(compiler, "owner", owner, raising=False)
    _rebind_kernels([(kernel, wrapper := object())])
    assert owner.kernel is wrapper
