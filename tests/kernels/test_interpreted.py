# SPDX-License-Identifier: Apache-2.0
"""Device functions and reductions under Triton's interpreter."""

import pytest
import torch

from vllm.triton_utils import tl, tldevice, triton


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tldevice.log1p(tl.load(x_ptr + at)))


def test_log1p(on_cpu: bool):
    if not on_cpu:
        pytest.skip("a GPU has its own")
    x = torch.tensor([-0.999, -0.5, -1e-3, -1e-6, 0.0, 1e-9, 2e-3, 5.0])
    out = torch.empty_like(x)
    _log1p_kernel[(1,)](x, out, BLOCK=8)
    torch.testing.assert_close(out, torch.log1p(x))


@triton.jit
def _argmax_of(x):
    return tl.max(x, axis=0, return_indices=True)


@triton.jit
def _argmax_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    _, index = _argmax_of(tl.load(x_ptr + row * BLOCK + tl.arange(0, BLOCK)))
    tl.store(out_ptr + row, index)


def test_argmax_of_all_nan_is_in_range(on_cpu: bool):
    """Logits of a profile run may be all NaN, since they are never computed."""
    if not on_cpu:
        pytest.skip("compiled there")
    x = torch.tensor([[torch.nan] * 4, [1.0, torch.nan, 3.0, 2.0]])
    out = torch.full((2,), -1)
    _argmax_kernel[(2,)](x, out, BLOCK=4)
    assert 0 <= out[0] < 4
    assert out[1] == 2


def test_kernel_with_device_function_runs_twice(on_cpu: bool):
    """Operations are patched once per launch, and restored after it."""
    if not on_cpu:
        pytest.skip("compiled there")
    x, out = torch.zeros(1, 4), torch.empty(1)
    for _ in range(2):
        _argmax_kernel[(1,)](x, out, BLOCK=4)
        assert tl.core.is_builtin(tl.load)
