# SPDX-License-Identifier: Apache-2.0
"""Finds the accepted path of a tree.

The target's own token is sampled at every row: the most likely one, or the one given by
the request's seed and the row's position (see `noise.py`). The walk starts at the last
token and goes to the child that holds the token sampled at the current row, until there
is none; the token sampled there is the bonus token. So the output is, token for token,
what the target samples without drafts, whatever the tree: it is built before anything
is sampled. The walk continues at a node with the total probability of its children
under the target (SpecInfer, arXiv 2305.09781, calls this naive sampling).
"""

import torch

from vllm.triton_utils import tl, triton

from .trees import DraftTrees

# Packs a node's row and the rank of its token into one number.
RANKS = tl.constexpr(256)


@triton.jit(
    do_not_specialize=["has_trees"], do_not_specialize_on_alignment=["path_ranks"]
)
def _walk_kernel(
    drawn,  # [rows] int64
    nodes,  # [rows] token of each row; negative is never accepted
    cu_num_logits,  # [n + 1] int32
    idx_mapping,  # [n] int64
    chain_only,  # [n] bool
    trees,  # TreePointers
    tree_stride,
    sampled,  # [n, >= K + 1] int64
    sampled_stride,
    num_sampled,  # [n] int32
    path,  # [n, K + 1] int32
    path_ranks,  # [n, K + 1] int32
    has_trees,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    begin = tl.load(cu_num_logits + req)
    rows = tl.load(cu_num_logits + req + 1) - begin
    row = tl.arange(0, BLOCK)
    is_node = (row > 0) & (row < rows)
    of_row = tl.load(idx_mapping + req) * tree_stride + row - 1
    of_tree = is_node & has_trees
    parent = tl.load(trees.parents + of_row, mask=of_tree, other=row - 1)
    rank = tl.load(trees.ranks + of_row, mask=of_tree, other=0)
    # Consecutive rows of best tokens are a chain of the batch.
    is_chain = (parent == row - 1) & (rank == 0)
    is_node &= is_chain | (tl.load(chain_only + req) == 0)
    place = row * RANKS + rank
    node = tl.load(nodes + begin + row, mask=is_node, other=-1).to(tl.int64)

    at, at_rank, goes_on, count = 0, 0, rows > 0, 0
    for depth in range(DEPTH + 1):
        token = tl.load(drawn + begin + at, mask=goes_on, other=0)
        tl.store(sampled + req * sampled_stride + depth, token, mask=goes_on)
        tl.store(path + req * (DEPTH + 1) + depth, at, mask=goes_on)
        tl.store(path_ranks + req * (DEPTH + 1) + depth, at_rank, mask=goes_on)
        count += goes_on.to(tl.int32)
        is_next = is_node & (parent == at) & (node == token) & goes_on
        found = tl.max(tl.where(is_next, place, 0), 0)
        goes_on = found > 0
        at, at_rank = found // RANKS, found % RANKS
    tl.store(num_sampled + req, count)


def walk_trees(
    trees: DraftTrees,
    drawn: torch.Tensor,
    nodes: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    chain_only: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    path: torch.Tensor,
    path_ranks: torch.Tensor,
    has_trees: bool = True,
) -> None:
    """Follows the target's tokens through each request's tree.

    Args:
        drawn: [rows] int64, the target's token after each row.
        nodes: [rows], the token that each row holds; negative is never accepted.
        cu_num_logits: [n + 1] int32, a request's rows: row 0 and its nodes.
        idx_mapping: [n] int64, request state.
        chain_only: [n] bool, whether only the chain of best tokens may be accepted.
        sampled: [n, at least K + 1] int64, written up to `num_sampled`: the tokens.
        num_sampled: [n] int32, written: accepted nodes and the bonus token.
        path: [n, K + 1] int32, written likewise: row of each accepted node, from row 0.
        path_ranks: [n, K + 1] int32, written likewise: ranks of their tokens.
        has_trees: whether the rows are those of trees; else of chains.
    """
    _walk_kernel[(len(idx_mapping),)](
        drawn,
        nodes,
        cu_num_logits,
        idx_mapping,
        chain_only,
        trees.pointers,
        trees.parents.stride(0),
        sampled,
        sampled.stride(0),
        num_sampled,
        path,
        path_ranks,
        has_trees,
        DEPTH=trees.max_depth,
        BLOCK=triton.next_power_of_2(trees.max_num_nodes + 1),
        num_warps=1,
    )
