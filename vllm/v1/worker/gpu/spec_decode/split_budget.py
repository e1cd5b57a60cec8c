# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request are verified, if a batch has a budget.

One kernel ranks all drafts of a batch and writes the offsets of its requests. vLLM's
adaptive verification takes some fifteen PyTorch operations and two copies for this, one
after the other before the target runs, in every trimmed step. That also works for
requests with unlike numbers of drafts; here they have the same number.
"""

import torch

from vllm.triton_utils import tl, triton

# More than any probability, as bits of a float32.
ABOVE_ONE = tl.constexpr(0x3F800001)
# With a probability of 1 a draft would rank equal to the previous one, and which of the
# two is left out could depend on that one. The margin exceeds the rounding of products.
LARGEST_PROB = tl.constexpr(1 - 2**-16)


@triton.jit
def _least_verified(bits, budget):
    """The least of the `budget` largest, by bisection: floats from 0 on are ordered
    like their bits, and there are fewer than 2**30 up to 1."""
    least, above = 0, ABOVE_ONE
    for _ in range(30):
        middle = (least + above) // 2
        is_enough = tl.sum((bits >= middle).to(tl.int32), 0) >= budget
        least = tl.where(is_enough, middle, least)
        above = tl.where(is_enough, above, middle)
    return least


@triton.jit(do_not_specialize=["n", "num_drafts", "budget", "num_starts"])
def _split_budget_kernel(
    probs,  # [R, K] float32, by request state
    probs_stride,
    idx_mapping,  # [n] request states
    query_start_loc,  # [num_starts] int32
    cu_num_logits,  # [n + 1] int32
    n,
    num_drafts,
    budget,
    num_others,
    num_starts,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_STARTS: tl.constexpr,
):
    req, draft = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    is_req = req < n
    state = tl.load(idx_mapping + req, mask=is_req, other=0).to(tl.int64)

    is_draft = is_req[:, None] & (draft < num_drafts)[None, :]
    at = probs + state[:, None] * probs_stride + draft[None, :]
    prob = tl.load(at, mask=is_draft, other=0.0)
    reached = tl.cumprod(tl.minimum(prob, LARGEST_PROB), 1)
    bits = tl.where(is_draft, reached.to(tl.int32, bitcast=True), -1)

    # Products fall from draft to draft, so a request's drafts above a bound are its
    # first ones. Drafts at the bound follow, as many as fit, in the order of requests.
    least = _least_verified(tl.ravel(bits), budget)
    larger = tl.sum((bits > least).to(tl.int32), 1)
    equal = tl.sum((bits == least).to(tl.int32), 1)
    left = budget - tl.sum(larger, 0) - (tl.cumsum(equal, 0) - equal)
    verified = larger + tl.minimum(equal, tl.maximum(left, 0))

    ends = tl.cumsum(tl.where(is_req, verified + num_others, 0), 0)
    tl.store(cu_num_logits + 1 + req, ends, mask=is_req)
    tl.store(query_start_loc + 1 + req, ends, mask=is_req)
    tl.store(cu_num_logits, 0)
    tl.store(query_start_loc, 0)
    num_tokens, place = tl.max(ends, 0), tl.arange(0, BLOCK_STARTS)
    is_behind = (place > n) & (place < num_starts)
    tl.store(query_start_loc + place, num_tokens, mask=is_behind)


def split_budget(
    probs: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_drafts: int,
    budget: int,
    query_start_loc: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_others: int = 1,
) -> None:
    """Writes the offsets of a batch of which only the most likely drafts are verified.

    Args:
        probs: [R, K] float32, how likely each draft is accepted if those before it
            are, by request state.
        idx_mapping: [n], request states.
        num_drafts: of each request; at most K.
        budget: drafts to verify, of all requests; at most all.
        query_start_loc: [most requests of a batch + 1] int32, written: where requests
            begin, and after them the number of tokens.
        cu_num_logits: [at least n + 1] int32, written: where their logits begin.
        num_others: tokens of each request that are not drafts; each has logits, too.
    """
    # Sized for the largest batch, so that nothing is compiled while serving.
    block_n = triton.next_power_of_2(len(query_start_loc) - 1)
    block_k = triton.next_power_of_2(probs.shape[1])
    _split_budget_kernel[(1,)](
        probs,
        probs.stride(0),
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        len(idx_mapping),
        num_drafts,
        budget,
        num_others,
        len(query_start_loc),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        BLOCK_STARTS=triton.next_power_of_2(len(query_start_loc)),
        num_warps=min(max(4, block_n * block_k // 1024), 16),
    )
