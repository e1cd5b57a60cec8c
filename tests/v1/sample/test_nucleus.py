# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p of the largest logits keep what sorting all of them keeps."""

import pytest
import torch

from vllm.v1.sample.ops.nucleus import MOST, WORTH, apply_top_k_top_p_to_largest
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

N, V = 6, WORTH + 3
# Rows that keep few tokens, and by the last one nearly all.
PEAKED = torch.tensor([4.0, 3.0, 6.0, 5.0, 4.0, 0.1])[:, None]


@pytest.fixture
def logits() -> torch.Tensor:
    return PEAKED * torch.randn(N, V, generator=torch.Generator().manual_seed(1))


def by_sorting(logits, k, p) -> torch.Tensor:
    return apply_top_k_top_p_pytorch(logits.clone(), k, p)


def check(logits, k, p, num_sorted: int) -> torch.Tensor:
    """Compares both, and how many rows have to be sorted."""
    rows = []

    def sort(some, *given):
        rows.append(len(some))
        return by_sorting(some, *given)

    before = logits.clone()
    found = apply_top_k_top_p_to_largest(logits, k, p, sort)
    assert torch.equal(logits, before)
    assert torch.equal(found, by_sorting(logits, k, p))
    assert sum(rows) == num_sorted
    return found


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9])
def test_top_p(logits: torch.Tensor, p: float):
    found = check(logits, None, torch.full((N,), p), 0 if p < 0.1 else 1)
    assert found.isfinite().any(dim=1).all()


def test_long_top_k_is_sorted(logits: torch.Tensor):
    """Top-p is of the probability that top-k keeps, even if fewer tokens have it."""
    check(logits, torch.full((N,), MOST + 1), torch.full((N,), 0.9), N)


def test_each_row_has_its_own(logits: torch.Tensor):
    """Also rows without top-k (V), without top-p (1.0), and without both."""
    k = torch.tensor([5, V, 7, V, MOST + 1, 30], dtype=torch.int32)
    p = torch.tensor([0.9, 0.7, 1.0, 1.0, 0.99999, 0.8])
    found = check(logits, k, p, 1)  # of the fifth row only 1024 are looked at
    assert torch.equal(found[3], logits[3])


@pytest.mark.parametrize("k, num_sorted", [(3, 0), (MOST - 10, N)])
def test_equal_logits(logits: torch.Tensor, k: int, num_sorted: int):
    """All with the logit of the last one are kept, even if not all are looked at."""
    logits[:] = torch.arange(V).div(100, rounding_mode="floor") / 2
    check(logits, torch.full((N,), k), torch.ones(N), num_sorted)


def test_logits_that_are_masked_already(logits: torch.Tensor):
    """By a grammar, for example; in a row of which all are, sorting decides."""
    logits[:, 40:] = -torch.inf
    logits[1] = -torch.inf
    p = torch.full((N,), 0.9)
    found = apply_top_k_top_p_to_largest(logits, None, p, by_sorting)
    expected = by_sorting(logits, None, p)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_small_vocabularies_are_sorted(logits: torch.Tensor):
    check(logits[:, : WORTH - 1].contiguous(), None, torch.full((N,), 0.9), N)
