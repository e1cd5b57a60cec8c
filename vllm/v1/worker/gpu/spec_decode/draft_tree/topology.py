# SPDX-License-Identifier: Apache-2.0
"""Builds each request's draft tree from the candidates, on the device.

A drafter that samples all positions in one pass gives a distribution for each of them.
The probability of a path is taken as the product over its nodes, and the tree holds the
N most likely paths. A node's probability never exceeds its parent's, so best-first
search (taking the best of a frontier again and again, as EAGLE-2, arXiv 2406.16858, and
DDTree build trees) finds exactly these, each parent before its children. So the first
nodes are a tree too, if fewer are verified. A request that can only use a chain has the
chain of best tokens as nodes 1 to K, whatever its probability; so has one near its last
position, if not all K drafts fit.

An autoregressive drafter gives a distribution for each position after its own drafts.
So only the best node of each depth has children: the tree is a chain with siblings.
(EAGLE-2 also continues less likely nodes, which takes a batch of rows in each pass.)

Each node is either the next sibling of a node that was taken (the next best token of
its depth) or the first child of one (the best token of the depth below).
"""

import torch

from vllm.triton_utils import tl, triton

from .trees import DraftTrees

NO_PARENT = tl.constexpr(-1)


@triton.jit
def _store_node(trees, draft, at, node, is_real, parent, depth, rank, token):
    """Node `node` (from 1) in column node - 1; one that is not real has no parent."""
    tl.store(trees.parents + at + node - 1, tl.where(is_real, parent, NO_PARENT))
    tl.store(trees.depths + at + node - 1, tl.where(is_real, depth, 1))
    tl.store(trees.ranks + at + node - 1, rank)
    tl.store(draft + node - 1, token.to(tl.int64))


@triton.jit
def _grow_kernel(
    log_probs,  # [n, K, C] float32, best first; n rows of `table_stride` depths
    tokens,  # [n, K, C] int32
    sample_requests,  # [n, K] int64, -1 where a position must not be drafted
    table_stride,
    idx_mapping,  # [n] int64, request state, -1 for padding
    chain_only,  # [n] bool
    trees,  # TreePointers
    tree_stride,
    draft_tokens,  # [n, N] int64
    draft_stride,
    K: tl.constexpr,
    C: tl.constexpr,
    NODES: tl.constexpr,
    CONTINUES_BEST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FRONTIER: tl.constexpr,
):
    req = tl.program_id(0)
    state = tl.load(idx_mapping + req)
    if state < 0:
        return
    at, draft = state * tree_stride, draft_tokens + req * draft_stride
    row = req * table_stride  # of depth 1

    # Position i is that of depth i + 1.
    i = tl.arange(0, BLOCK_K)
    is_drafted = i < K
    is_drafted &= tl.load(sample_requests + row + i, mask=i < K, other=-1) >= 0
    depths = tl.sum(is_drafted.to(tl.int32), 0)
    needs_chain = (tl.load(chain_only + req) != 0) | (depths < K)
    given = tl.where(needs_chain, K, 0)  # nodes of the chain
    chain = tl.load(tokens + (row + i) * C, mask=i < given, other=0)
    tl.store(draft + i, chain.to(tl.int64), mask=i < given)
    tl.store(trees.parents + at + i, i, mask=i < given)
    tl.store(trees.depths + at + i, i + 1, mask=i < given)
    tl.store(trees.ranks + at + i, 0, mask=i < given)

    # The frontier. Lane j holds the first child of node j (lane 0: of row 0), and once
    # that is taken its next sibling. Given nodes are taken: lanes hold their siblings.
    lane = tl.arange(0, FRONTIER)
    is_taken = lane < given
    first_rank = is_taken.to(tl.int32)
    exists = (lane < depths) & (lane <= given) & (first_rank < C)
    # Log-probability of the path to the parent, and of the whole path.
    above = tl.load(log_probs + (row + lane) * C, mask=lane < depths, other=0.0)
    above = tl.cumsum(above, 0) - above
    own = tl.load(log_probs + (row + lane) * C + first_rank, mask=exists, other=0.0)
    score = tl.where(exists, above + own, float("-inf"))
    # Parent, depth and rank of each in one number, so that one sum reads the best lane.
    what = lane * 65536 + (lane + 1) * 256 + first_rank

    for node in range(given + 1, NODES + 1):
        taken, hit = tl.max(score, 0), lane == tl.argmax(score, 0)
        is_real = taken > float("-inf")
        kind = tl.sum(tl.where(hit, what, 0), 0)
        before = tl.sum(tl.where(hit, above, 0.0), 0)
        parent, depth, rank = kind // 65536, kind // 256 % 256, kind % 256
        place = (row + depth - 1) * C + rank
        token = tl.load(tokens + place, mask=is_real, other=0)
        _store_node(trees, draft, at, node, is_real, parent, depth, rank, token)

        more = is_real & (rank + 1 < C)
        sibling = tl.load(log_probs + place + 1, mask=more, other=float("-inf"))
        score = tl.where(hit, before + sibling, score)
        what = tl.where(hit, kind + 1, what)
        deeper = is_real & (depth < depths)
        if CONTINUES_BEST:
            deeper &= rank == 0
        child = tl.load(log_probs + (row + depth) * C, mask=deeper, other=float("-inf"))
        free = lane == node
        score = tl.where(free, taken + child, score)
        above = tl.where(free, taken, above)
        what = tl.where(free, node * 65536 + (depth + 1) * 256, what)


def grow_trees(
    log_probs: torch.Tensor,
    tokens: torch.Tensor,
    sample_requests: torch.Tensor,
    idx_mapping: torch.Tensor,
    chain_only: torch.Tensor,
    trees: DraftTrees,
    draft_tokens: torch.Tensor,
    num_nodes: int,
    continues_best: bool = False,
) -> None:
    """Builds the tree of each request, and writes its tokens.

    Args:
        log_probs: [n, K, C] float32, of the candidates of each position, best first.
            Requests may be further apart than K positions, equally in all three.
        tokens: [n, K, C] int32.
        sample_requests: [n, K] int64, -1 where a position must not be drafted; these
            are the last positions of a request.
        idx_mapping: [n] int64, request state; -1 for padding, which is left alone.
        chain_only: [at least n] bool, requests whose nodes 1 to K must be a chain.
        trees: written, by request state.
        draft_tokens: [n, at least N] int64, written: the nodes' tokens; 0 for a node
            that does not exist because there are not as many paths.
        num_nodes: nodes of a tree (N), from K to `trees.max_num_nodes`.
        continues_best: whether only the best node of a depth may have children.
    """
    num_reqs, depth, count = log_probs.shape
    stride = sample_requests.stride(0)
    assert log_probs.stride() == tokens.stride() == (stride * count, count, 1)
    assert len(idx_mapping) == num_reqs and depth <= trees.max_depth
    assert depth <= num_nodes <= trees.max_num_nodes
    _grow_kernel[(num_reqs,)](
        log_probs,
        tokens,
        sample_requests,
        stride,
        idx_mapping,
        chain_only,
        trees.pointers,
        trees.parents.stride(0),
        draft_tokens,
        draft_tokens.stride(0),
        K=depth,
        C=count,
        NODES=num_nodes,
        CONTINUES_BEST=continues_best,
        BLOCK_K=triton.next_power_of_2(depth),
        FRONTIER=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )
