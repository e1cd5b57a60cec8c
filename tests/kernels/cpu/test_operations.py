# SPDX-License-Identifier: Apache-2.0
"""Triton operations, compiled for the CPU, compared with the interpreter."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.triton_utils import tl, tldevice, triton

from .twice import Twice

SIZE = 64
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
SLOW = dict(
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
INTEGERS = (torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16)
# Special cases of arithmetic and comparisons, and values near them.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, 1e-30, -1e30, *map(float, ("inf", "-inf"))]
SPECIAL += [float("nan")]


class Pairs(NamedTuple):
    first: torch.Tensor | None
    second: torch.Tensor


@triton.jit
def _integers_kernel(x, y, out, mask, N: tl.constexpr):
    i = tl.arange(0, N)
    taken = tl.load(mask + i) != 0
    a, b = tl.load(x + i), tl.load(y + i, mask=taken, other=7)
    tl.store(out + i, a + b * a - b)
    tl.store(out + N + i, (a & b) ^ (a | b), mask=taken)
    tl.store(out + 2 * N + i, a // b, mask=b != 0)
    tl.store(out + 3 * N + i, a % b, mask=b != 0)
    tl.store(out + 4 * N + i, tl.where(a < b, tl.minimum(a, b), tl.maximum(a, b) >> 1))
    tl.store(out + 5 * N + i, (a.to(tl.uint8) << 2).to(a.dtype))
    tl.store(out + 6 * N + i, tl.abs(a.to(tl.int64)).to(a.dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@settings(max_examples=10, **SLOW)
@given(seed=st.integers(0, 2**31), bound=st.sampled_from([4, 200]))
def test_integers(twice: Twice, dtype: torch.dtype, seed: int, bound: int):
    chance = torch.Generator().manual_seed(seed)
    low = 0 if dtype is torch.uint8 else -bound
    x, y = torch.randint(low, bound, (2, SIZE), generator=chance).to(dtype)
    mask = torch.randint(0, 2, (SIZE,), generator=chance)
    _integers_kernel[(1,)](x, y, torch.zeros(7 * SIZE, dtype=dtype), mask, N=SIZE)


@triton.jit
def _floats_kernel(x, y, out, truth, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, a + b * a - b)
    tl.store(out + N + i, (a.to(tl.float32) / b.to(tl.float32)).to(a.dtype))
    tl.store(out + 2 * N + i, tl.where(a < b, a, -b))
    tl.store(out + 3 * N + i, tl.abs(a))
    tl.store(out + 4 * N + i, (a.to(tl.float64) * 3).to(a.dtype))
    tl.store(out + 5 * N + i, i.to(a.dtype) * 0.3)
    tl.store(truth + i, (a == b) | (a > 0.5))
    tl.store(truth + N + i, a != a)
    tl.store(truth + 2 * N + i, tldevice.isnan(a.to(tl.float32)).to(tl.int1))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=10, **SLOW)
@given(
    x=st.lists(st.sampled_from(SPECIAL) | st.floats(width=16), min_size=2, max_size=9)
)
def test_floats(twice: Twice, dtype: torch.dtype, x: list[float]):
    a = torch.tensor((x * SIZE)[:SIZE], dtype=dtype)
    out = torch.zeros(6 * SIZE, dtype=dtype)
    truth = torch.zeros(3 * SIZE, dtype=torch.bool)
    _floats_kernel[(1,)](a, a.flip(0), out, truth, N=SIZE)


@triton.jit
def _exp_log_kernel(x, out, size, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, tl.exp(a))
    tl.store(out + size + i, tl.log(a))


@pytest.mark.parametrize("low, high", [(-(2**31), 2**31), (0x3F000000, 0x40000000)])
def test_exp_and_log_round_to_a_neighbour(low: int, high: int):
    """Of all float32, those near zero and NaN too, and of those near 1."""
    size, chance = 2**20, torch.Generator().manual_seed(low)
    bits = torch.randint(low, high, (size,), generator=chance, dtype=torch.int32)
    x = bits.view(torch.float32)
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    found = torch.empty(2, size)
    _exp_log_kernel[(size // SIZE,)](x, found, size, N=SIZE)
    exact = torch.stack([x.double().exp(), x.double().log()])
    wanted = exact.float()
    for infinity in (torch.inf, -torch.inf):
        neighbour = wanted.nextafter(torch.tensor(infinity))
        wanted = torch.where(found == neighbour, found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@triton.jit
def _reductions_kernel(x, out, index, ROWS: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + j[None, :])
    best, at = tl.max(a, axis=1, return_indices=True)
    tl.store(out + i, best)
    tl.store(index + i, at)
    tl.store(index + ROWS + j, tl.argmin(a, axis=0))
    tl.store(out + ROWS + j, tl.sum(a, axis=0))
    tl.store(out + ROWS + N + j, tl.sum(tl.trans(a), axis=1))
    tl.store(out + ROWS + 2 * N, tl.min(tl.min(a, axis=1), axis=0))
    flat = tl.load(x + j)
    tl.store(out + ROWS + 3 * N + j, tl.cumsum(flat, 0))
    tl.store(out + ROWS + 4 * N + j, tl.cumsum(flat, 0, reverse=True))
    tl.store(out + ROWS + 5 * N, tl.sum(flat, axis=0))


@pytest.mark.parametrize("rows, size", [(1, 1), (4, 8), (2, 16), (8, 128)])
@settings(max_examples=10, **SLOW)
@given(seed=st.integers(0, 2**31))
def test_reductions(twice: Twice, rows: int, size: int, seed: int):
    """With few distinct values, to test ties: the first one wins."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (rows, size), generator=chance).float()
    out = torch.zeros(rows + 5 * size + 1)
    index = torch.zeros(rows + size, dtype=torch.int32)
    _reductions_kernel[(1,)](x, out, index, ROWS=rows, N=size)


@triton.jit
def _with_early_return(x, y, step, limit):
    if step < limit:
        return x + step, limit
    for i in range(step):
        if i == 2:
            y += x
    return y - x, step


@triton.jit
def _calls_kernel(x, out, limit, N: tl.constexpr):
    """Triton inlines none of these calls, two of which are of the same function."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = a * 2
    for step in range(6):
        a, last = _with_early_return(a, b, step, limit)
        if last > limit:
            b, _ = _with_early_return(b, i, step, last)
        tl.store(out + N + step, last)
    tl.store(out + i, a)


@pytest.mark.parametrize("limit", [0, 3, 9])
def test_calls_in_loops_and_branches(twice: Twice, limit: int):
    x = torch.arange(16, dtype=torch.int32)
    _calls_kernel[(1,)](x, torch.zeros(32, dtype=torch.int32), limit, N=16)


@triton.jit
def _next_collatz(number):
    return tl.where(number % 2 == 0, number // 2, 3 * number + 1)


@triton.jit
def _control_kernel(x, out, pairs, limit, N: tl.constexpr):
    """Loops that carry scalars and tensors, early returns, a tuple, a 2D grid."""
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    if at >= limit:
        return
    number = tl.load(x + at)
    if number < 0:
        tl.store(out + at * N, number)
        return
    i = tl.arange(0, N).to(tl.int64)
    seen, previous, count = i * 0, i, 0
    while number > 1 and count < N:
        if count % 3 == 0:
            seen = tl.where(i == count, number, seen)
        elif pairs.first is not None:
            seen += tl.load(pairs.first + i)
        seen, previous = previous + 1, seen
        number = _next_collatz(number)
        count += 1
    for step in range(count, 0, -1):
        seen += previous * step
    for inner in tl.static_range(2):
        seen += inner
    tl.store(out + at * N + i, seen)
    tl.atomic_add(pairs.second + i % 4, seen)


@pytest.mark.parametrize("has_first", [True, False])
@settings(max_examples=10, **SLOW)
@given(x=st.lists(st.integers(-1, 30), min_size=6, max_size=6), limit=st.integers(0, 6))
def test_control_flow(twice: Twice, has_first: bool, x: list[int], limit: int):
    first = torch.arange(16) if has_first else None
    pairs = Pairs(first, torch.zeros(4, dtype=torch.int64))
    out = torch.zeros(6, 16, dtype=torch.int64)
    _control_kernel[(2, 3)](torch.tensor(x), out, pairs, limit, N=16)


@triton.jit
def _bfloat16_kernel(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = a.to(tl.bfloat16)
    tl.store(out + i, b)
    tl.store(out + N + i, b * b + 0.3)
    tl.store(out + 2 * N + i, tl.where(b < 0, -b, tl.sqrt(a)))


def test_bfloat16():
    """Compared with PyTorch: the interpreter has no bfloat16 constants."""
    bits = torch.arange(-(2**31), 2**31, 2**32 // SIZE + 8193)
    x = torch.cat([bits.int().view(torch.float32), torch.tensor(SPECIAL)])[:SIZE]
    out = torch.zeros(3, SIZE, dtype=torch.bfloat16)
    _bfloat16_kernel[(1,)](x, out, N=SIZE)
    b = x.bfloat16()
    expected = [b, b * b + 0.3, torch.where(b < 0, -b, x.sqrt().bfloat16())]
    torch.testing.assert_close(
        out, torch.stack(expected), rtol=0, atol=0, equal_nan=True
    )
