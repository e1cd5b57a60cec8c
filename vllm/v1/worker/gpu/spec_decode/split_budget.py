# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request are verified, where a batch has a budget.

One kernel ranks all drafts of a batch and lays the batch out. In vLLM's own adaptive
verification some fifteen operations of PyTorch and two copies do so, one after the
other before the target begins, in every step that is trimmed.
"""

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

# More than any probability, as bits of a float32.
ABOVE_ONE = tl.constexpr(0x3F800001)
# A chance of 1 would rank a draft as the one before it: which of the two is left out
# could then depend on that one. By so much more than products are rounded by.
LARGEST_CHANCE = tl.constexpr(1 - 2**-16)


@triton.jit
def _least_verified(bits, budget):
    """Of the `budget` largest the least, found by halving: floats are ordered as their
    bits are, from 0 on, and up to 1 there are less than 2**30."""
    least, above = 0, ABOVE_ONE
    for _ in range(30):
        middle = (least + above) // 2
        is_enough = tl.sum((bits >= middle).to(tl.int32), 0) >= budget
        least = tl.where(is_enough, middle, least)
        above = tl.where(is_enough, above, middle)
    return least


@triton.jit(do_not_specialize=["n", "budget", "num_starts"])
def _split_budget_kernel(
    chances,  # [R, K] float32, by request state
    chances_stride,
    idx_mapping,  # [n] request states
    counts,  # [2, n] int32, drafts of each request, and its other tokens
    query_start_loc,  # [num_starts] int32
    cu_num_logits,  # [n + 1] int32
    n,
    budget,
    num_bonus_tokens,
    num_starts,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_STARTS: tl.constexpr,
):
    req, draft = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_req = req < n
    state = tl.load(idx_mapping + req, mask=is_req, other=0).to(tl.int64)
    num_drafts = tl.load(counts + req, mask=is_req, other=0)
    others = tl.load(counts + n + req, mask=is_req, other=0)

    is_draft = draft[None, :] < num_drafts[:, None]
    at = chances + state[:, None] * chances_stride + draft[None, :]
    chance = tl.load(at, mask=is_draft & (draft < K)[None, :], other=0.0)
    survival = tl.cumprod(tl.minimum(chance, LARGEST_CHANCE), 1)
    bits = tl.where(is_draft, survival.to(tl.int32, bitcast=True), -1)

    # Survival falls from draft to draft, so those above a bound are a request's first
    # ones; so are those of equals that fit, which are taken in the order of requests.
    least = _least_verified(tl.ravel(bits), budget)
    larger = tl.sum((bits > least).to(tl.int32), 1)
    equal = tl.sum((bits == least).to(tl.int32), 1)
    left = budget - tl.sum(larger, 0) - (tl.cumsum(equal, 0) - equal)
    verified = larger + tl.minimum(equal, tl.maximum(left, 0))

    logits = tl.cumsum(tl.where(is_req, verified + num_bonus_tokens, 0), 0)
    tl.store(cu_num_logits + 1 + req, logits, mask=is_req)
    ends = tl.cumsum(verified + others, 0)
    tl.store(query_start_loc + 1 + req, ends, mask=is_req)
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)
    num_tokens, place = tl.max(ends, 0), tl.arange(0, BLOCK_STARTS)
    is_behind = (place > n) & (place < num_starts)
    tl.store(query_start_loc + place, num_tokens, mask=is_behind)


def split_budget(
    chances: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: np.ndarray,
    num_others: np.ndarray,
    budget: int,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_bonus_tokens: int = 1,
) -> None:
    """Lays out a batch of which the drafts likeliest to be accepted are verified.

    Args:
        chances: [R, K] float32, how likely each draft is accepted if those before it
            are, by request state.
        idx_mapping: [n], request states.
        num_drafts: [n], of each request; at most K.
        num_others: [n], its tokens that are no drafts.
        budget: drafts that are verified, of all requests; at most all.
        query_start_loc: [most requests of a batch + 1] int32, where requests begin is
            written here, and behind them how many tokens there are.
        cu_num_logits: [at least n + 1] int32, where their rows of logits begin.
        num_bonus_tokens: rows of logits that a request has besides those of drafts.
    """
    n, (_, depth) = len(num_drafts), chances.shape
    # As large as any batch, so that nothing is compiled while requests are served.
    block_n = triton.next_power_of_2(len(query_start_loc) - 1)
    block_k = triton.next_power_of_2(depth)
    counts = async_tensor_h2d(
        np.stack([num_drafts, num_others]).astype(np.int32), device=chances.device
    )
    _split_budget_kernel[(1,)](
        chances,
        chances.stride(0),
        idx_mapping,
        counts,
        query_start_loc,
        cu_num_logits,
        n,
        budget,
        num_bonus_tokens,
        len(query_start_loc),
        K=depth,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_STARTS=triton.next_power_of_2(len(query_start_loc)),
        num_warps=min(max(4, block_n * block_k // 1024), 16),
    )
