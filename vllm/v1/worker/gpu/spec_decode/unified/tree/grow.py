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

A lattice (`drafters/dflash.py`) gives one after each candidate of the position before,
and an autoregressive drafter one after each node that its passes continue (`beams.py`):
there a position has several rows of candidates, and each candidate names the row of
those after it.

Each node is either the next sibling of a node that was taken (the next best token
after their parent) or the first child of one (the best token after it).

Probabilities are a softmax over the candidates only (`argmax.py`): a drafter that
samples all positions at once is right more often than its probabilities say, and with
this softmax its trees grow deeper.
"""

from typing import NamedTuple

import torch

from vllm.triton_utils import tl, triton

from .trees import DraftTrees

NO_PARENT = tl.constexpr(-1)


class Candidates(NamedTuple):
    """Candidates of each position, best first, of n requests.

    Attributes:
        log_probs: [n, K, P, C] float32, in P rows.
        tokens: [n, K, P, C] int32, in the target's ids.
        next_rows: [n, K, P, C] int32, the row of the candidates after each one, -1 if
            there are none. Of the first position only row 0 is read, and the best
            candidate of each row of a chain names a row. None: there is one row.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    next_rows: torch.Tensor | None = None

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], names_rows: bool, device: torch.device
    ) -> "Candidates":
        ints = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(torch.zeros(shape, device=device), *ints[: 1 + names_rows])

    def of_first(self, num_reqs: int, depth: int) -> "Candidates":
        """The first positions of the first requests."""
        tables = (table for table in self if table is not None)
        return Candidates(*(table[:num_reqs, :depth] for table in tables))


@triton.jit
def _store_node(trees, draft, at, node, is_real, parent, depth, rank, token):
    """Node `node` (from 1) in column node - 1; one that is not real has no parent."""
    tl.store(trees.parents + at + node - 1, tl.where(is_real, parent, NO_PARENT))
    tl.store(trees.depths + at + node - 1, tl.where(is_real, depth, 1))
    tl.store(trees.ranks + at + node - 1, rank)
    tl.store(draft + node - 1, token.to(tl.int64))


@triton.jit
def _grow_kernel(
    candidates,  # Candidates; n rows of `table_stride` depths
    sample_requests,  # [n, K] int64, -1 where a position must not be drafted
    table_stride,
    idx_mapping,  # [n] int64, request state, -1 for padding
    chain_only,  # [n] bool
    trees,  # DraftTrees
    draft_tokens,  # [n, N] int64
    draft_stride,
    K: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    NODES: tl.constexpr,
    NAMES_ROWS: tl.constexpr,  # else the only one
    BLOCK_K: tl.constexpr,
    FRONTIER: tl.constexpr,
):
    req = tl.program_id(0)
    state = tl.load(idx_mapping + req)
    if state < 0:
        return
    log_probs, tokens = candidates.log_probs, candidates.tokens
    at, draft = state * trees.max_num_nodes, draft_tokens + req * draft_stride
    row = req * table_stride  # of depth 1

    # Position i is that of depth i + 1.
    i = tl.arange(0, BLOCK_K)
    is_drafted = i < K
    is_drafted &= tl.load(sample_requests + row + i, mask=i < K, other=-1) >= 0
    depths = tl.sum(is_drafted.to(tl.int32), 0)
    needs_chain = (tl.load(chain_only + req) != 0) | (depths < K)
    given = tl.where(needs_chain, K, 0)  # nodes of the chain

    # The frontier. Lane j holds the first child of node j (lane 0: of row 0), and once
    # that is taken its next sibling. Given nodes are taken: lanes hold their siblings.
    lane = tl.arange(0, FRONTIER)
    row_after = tl.zeros([FRONTIER], tl.int32)  # of the candidates after node j
    chain_row = 0
    for depth in range(given):
        place = ((row + depth) * P + chain_row) * C
        token = tl.load(tokens + place)
        _store_node(
            trees, draft, at, depth + 1, needs_chain, depth, depth + 1, 0, token
        )
        if P > 1:
            chain_row = tl.maximum(tl.load(candidates.next_rows + place), 0)
            row_after = tl.where(lane == depth + 1, chain_row, row_after)

    is_taken = lane < given
    first_rank = is_taken.to(tl.int32)
    exists = (lane < depths) & (lane <= given) & (first_rank < C)
    # Log-probability of the path to the parent, and of the whole path.
    best = ((row + lane) * P + row_after) * C
    above = tl.load(log_probs + best, mask=lane < tl.minimum(depths, given), other=0.0)
    above = tl.cumsum(above, 0) - above
    own = tl.load(log_probs + best + first_rank, mask=exists, other=0.0)
    score = tl.where(exists, above + own, float("-inf"))
    # Parent, depth and rank of each in one number, so that one sum reads the best lane.
    what = lane * 65536 + (lane + 1) * 256 + first_rank

    for node in range(given + 1, NODES + 1):
        taken, hit = tl.max(score, 0), lane == tl.argmax(score, 0)
        is_real = taken > float("-inf")
        kind = tl.sum(tl.where(hit, what, 0), 0)
        before = tl.sum(tl.where(hit, above, 0.0), 0)
        parent, depth, rank = kind // 65536, kind // 256 % 256, kind % 256
        of_parent = tl.sum(tl.where(hit, row_after, 0), 0) if P > 1 else 0
        place = ((row + depth - 1) * P + of_parent) * C + rank
        token = tl.load(tokens + place, mask=is_real, other=0)
        _store_node(trees, draft, at, node, is_real, parent, depth, rank, token)

        more = is_real & (rank + 1 < C)
        sibling = tl.load(log_probs + place + 1, mask=more, other=float("-inf"))
        score = tl.where(hit, before + sibling, score)
        what = tl.where(hit, kind + 1, what)
        deeper, after = is_real & (depth < depths), 0
        if NAMES_ROWS:
            after = tl.load(candidates.next_rows + place, mask=deeper, other=-1)
            deeper &= after >= 0
        child = ((row + depth) * P + after) * C
        child = tl.load(log_probs + child, mask=deeper, other=float("-inf"))
        free = lane == node
        score = tl.where(free, taken + child, score)
        above = tl.where(free, taken, above)
        what = tl.where(free, node * 65536 + (depth + 1) * 256, what)
        if P > 1:
            row_after = tl.where(free, after, row_after)


def grow_trees(
    candidates: Candidates,
    sample_requests: torch.Tensor,
    idx_mapping: torch.Tensor,
    chain_only: torch.Tensor,
    trees: DraftTrees,
    draft_tokens: torch.Tensor,
    num_nodes: int,
) -> None:
    """Builds the tree of each request, and writes its tokens.

    Args:
        candidates: requests may be further apart than K positions, equally in all of
            these and in `sample_requests`.
        sample_requests: [n, K] int64, -1 where a position must not be drafted; these
            are the last positions of a request.
        idx_mapping: [n] int64, request state; -1 for padding, which is left alone.
        chain_only: [at least n] bool, requests whose nodes 1 to K must be a chain.
        trees: written, by request state.
        draft_tokens: [n, at least N] int64, written: the nodes' tokens; 0 for a node
            that does not exist because there are not as many paths.
        num_nodes: nodes of a tree (N), from K to `trees.max_num_nodes`.
    """
    num_reqs, depth, num_rows, count = candidates.tokens.shape
    stride, names_rows = sample_requests.stride(0), candidates.next_rows is not None
    for table in candidates[: 2 + names_rows]:
        assert table[0].is_contiguous() and table.shape == candidates.tokens.shape
        assert table.stride(0) == stride * num_rows * count
    assert names_rows or num_rows == 1
    assert len(idx_mapping) == num_reqs and depth <= trees.max_depth
    assert depth <= num_nodes <= trees.max_num_nodes
    _grow_kernel[(num_reqs,)](
        candidates,
        sample_requests,
        stride,
        idx_mapping,
        chain_only,
        trees,
        draft_tokens,
        draft_tokens.stride(0),
        K=depth,
        P=num_rows,
        C=count,
        NODES=num_nodes,
        NAMES_ROWS=names_rows,
        BLOCK_K=triton.next_power_of_2(depth),
        FRONTIER=triton.next_power_of_2(num_nodes),
        num_warps=1,
    )
