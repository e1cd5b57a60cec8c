# SPDX-License-Identifier: Apache-2.0
"""The drafts of a batch that are likeliest to be accepted get the budget."""

import numpy as np
import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.trimming import split_budget

DEVICE = torch.device("cpu" if current_platform.is_cpu() else "cuda")
STATES, BEHIND = 40, 3


def split(
    chances: np.ndarray,
    states: np.ndarray,
    num_drafts: int,
    num_others: int,
    budget: int,
) -> np.ndarray:
    """[n], verified drafts of each request; asserts that the layout matches them."""
    n = len(states)
    starts = torch.full((n + 1 + BEHIND,), -1, dtype=torch.int32, device=DEVICE)
    logits = torch.full((n + 4,), -1, dtype=torch.int32, device=DEVICE)
    split_budget(
        torch.tensor(chances, dtype=torch.float32, device=DEVICE),
        torch.tensor(states, device=DEVICE),
        num_drafts,
        budget,
        starts,
        logits,
        num_others,
    )
    found = logits.diff()[:n].cpu().numpy() - num_others
    assert logits[0] == starts[0] == 0 and (logits[n + 1 :] == -1).all()
    assert starts[: n + 1].tolist() == logits[: n + 1].tolist()
    assert (starts[n:] == starts[n]).all()
    return found


@pytest.mark.parametrize("n, depth", [(1, 1), (8, 3), (13, 8), (32, 31)])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.4, 0.97, 1.0])
@pytest.mark.parametrize("unused, num_others", [(0, 1), (2, 2)])
def test_likeliest_drafts_are_verified(
    n: int, depth: int, share: float, unused: int, num_others: int
):
    rng = np.random.default_rng(n + depth)
    chances = rng.uniform(0.3, 1.0, (STATES, depth)).astype(np.float32)
    states = rng.permutation(STATES)[:n]
    drafted = max(1, depth - unused)
    survival = chances[states, :drafted].cumprod(1)
    budget = round(share * n * drafted)
    ranked = np.sort(survival, axis=None)[::-1]
    least = ranked[budget - 1] if budget else 2.0
    found = split(chances, states, drafted, num_others, budget)
    assert found.tolist() == (survival >= least).sum(1).tolist()


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("budget", [1, 5, 11, 23])
def test_budget_is_used_up_by_equal_drafts(chance: float, budget: int):
    """Also with probabilities of 0 and 1, where a request's drafts are all equal."""
    n, depth = 6, 4
    equal = np.full((n, depth), chance)
    found = split(equal, np.arange(n), depth, 1, budget)
    assert found.sum() == budget and (found <= depth).all()
    if chance:
        assert found.max() - found.min() <= 1
