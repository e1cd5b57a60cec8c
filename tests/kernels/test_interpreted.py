# SPDX-License-Identifier: Apache-2.0
"""Device functions under Triton's interpreter."""

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
