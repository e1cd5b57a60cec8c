# SPDX-License-Identifier: Apache-2.0
"""Draft trees, and the rows that a step has for their nodes.

A request whose tree is verified has N + 1 rows in the step. Row 0 holds its last token,
row i node i of the tree:

    row           0      1     2    ..   N
    token         last   nodes, most likely first
    position      p      p + depth of the node
    KV slot       p      p + 1  p + 2   ..  p + N

Rows of the same depth share a position, so a row's KV slot follows its number instead.
A row attends to all positions before p, to row 0 and to its ancestors; see
`attend.py`. The KV of the accepted path is moved to the slots of its positions
afterwards; see `accept.py`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm.config.drafter import MAX_NODES
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.input_batch import InputBatch


class DraftTrees(NamedTuple):
    """Topology of each request's tree, by request state.

    Attributes:
        parents: [R, N] int32, the row of each node's parent: 0 is the last token's, -1
            means that the node does not exist, and is never accepted.
        depths: [R, N] int32, from 1 to K.
        ranks: [R, N] int32, rank of the node's token at its depth; 0 is the best.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ranks: torch.Tensor
    max_depth: int
    max_num_nodes: int

    @classmethod
    def chains(
        cls, max_num_reqs: int, max_depth: int, max_num_nodes: int, device: torch.device
    ) -> "DraftTrees":
        """Until a tree is grown, the first K columns are a chain."""
        assert max_depth <= max_num_nodes <= MAX_NODES
        column = torch.arange(max_num_nodes, dtype=torch.int32, device=device)
        parents = column.masked_fill(column >= max_depth, -1).repeat(max_num_reqs, 1)
        depths = (parents + 1).clamp(min=1)
        return cls(parents, depths, torch.zeros_like(depths), max_depth, max_num_nodes)


class TreeRows:
    """Tensors of a step by row and by request, at fixed addresses.

    Attributes:
        masks: [max_num_tokens, 2] int64, by row of the batch: bit j of the 128 says
            whether the row attends to row j of its request.
        depths: [max_num_tokens] int32, by row of the batch: depth of its node, 0 for
            row 0.
        prefix_lens: [R] int32, tokens before each request's queries; 0 for padding.
        num_leading: [R] int32, queries before row 0, of known tokens; mostly none.
        chain_only: [R] bool, by request of the batch: processing its logits depends on
            the tokens before a row, so it can only use a chain.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device):
        self.masks = torch.ones(max_num_tokens, 2, dtype=torch.int64, device=device)
        self.depths = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self.prefix_lens, self.num_leading = (
            torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
            for _ in range(2)
        )
        self.chain_only = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)


@dataclass
class TreeAttention:
    """Tree attention of a step; part of its attention metadata.

    Attributes:
        rows: which rows attend to which.
        num_reqs: requests with tree attention, which come first in the batch: those
            with drafts, or all of them. A request without drafts is a tree of one row,
            after the known tokens of its prompt.
        num_tokens: rows of these requests.
        covers_batch: whether the batch has no other requests.
        max_query_len: the most rows of one of these requests.
        max_tree_len: the most rows of a tree, which a prompt beside it may exceed.
        num_before: rows of each request from earlier passes, which are in the KV cache
            behind the prefix; then all requests have as many rows as each other.
    """

    rows: TreeRows
    num_reqs: int
    num_tokens: int
    covers_batch: bool
    max_query_len: int
    max_tree_len: int
    num_before: int = 0


@triton.jit(do_not_specialize=["num_reqs"])
def _lay_out_rows_kernel(
    idx_mapping,  # [n] int64
    query_start_loc,  # [n + 1] int32
    cu_num_logits,  # [n + 1] int32: row 0 and the nodes are a request's last queries
    seq_lens,  # [n] int32
    trees,  # DraftTrees
    positions,  # [num_tokens] int64, p + row; in place
    masks,
    row_depths,
    prefix_lens,
    num_leading,
    num_reqs,
    max_num_reqs,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    if req == num_reqs:
        for i in range(num_reqs, max_num_reqs, BLOCK):
            behind = i + tl.arange(0, BLOCK)
            tl.store(prefix_lens + behind, 0, mask=behind < max_num_reqs)
            tl.store(num_leading + behind, 0, mask=behind < max_num_reqs)
        return
    state = tl.load(idx_mapping + req)
    end = tl.load(query_start_loc + req + 1)
    rows = tl.load(cu_num_logits + req + 1) - tl.load(cu_num_logits + req)
    begin = end - rows
    queries = end - tl.load(query_start_loc + req)
    tl.store(prefix_lens + req, tl.load(seq_lens + req) - queries)
    tl.store(num_leading + req, queries - rows)

    row = tl.arange(0, BLOCK)
    inside, is_node = row < rows, (row > 0) & (row < rows)
    tree = state * trees.max_num_nodes - 1
    depth = tl.load(trees.depths + tree + row, mask=is_node, other=0)
    first = tl.load(positions + begin)
    tl.store(positions + begin + row, first + depth, mask=inside)
    tl.store(row_depths + begin + row, depth, mask=inside)

    one = tl.full([BLOCK], 1, tl.int64)
    low = tl.where(row < 64, one << (row % 64).to(tl.int64), 0) | 1
    high = tl.where(row >= 64, one << (row % 64).to(tl.int64), 0)
    at = row
    for _ in tl.static_range(DEPTH - 1):
        up = is_node & (at > 0)
        at = tl.maximum(tl.load(trees.parents + tree + at, mask=up, other=0), 0)
        bit = one << (at % 64).to(tl.int64)
        low |= tl.where(at < 64, bit, 0)
        high |= tl.where(at >= 64, bit, 0)
    tl.store(masks + (begin + row) * 2, low, mask=inside)
    tl.store(masks + (begin + row) * 2 + 1, high, mask=inside)


def lay_out_rows(trees: DraftTrees, rows: TreeRows, batch: InputBatch) -> None:
    """Writes the positions and attention masks of the rows of a step's trees.

    A request whose drafts were cut has the first nodes of its tree, which are a tree
    too. One without drafts keeps its positions.

    Args:
        batch: of p + row, its positions become p + depth.
    """
    num_reqs = batch.num_reqs
    _lay_out_rows_kernel[(num_reqs + 1,)](
        batch.idx_mapping,
        batch.query_start_loc,
        batch.cu_num_logits,
        batch.seq_lens,
        trees,
        batch.positions,
        rows.masks,
        rows.depths,
        rows.prefix_lens,
        rows.num_leading,
        num_reqs,
        len(rows.prefix_lens),
        DEPTH=trees.max_depth,
        BLOCK=triton.next_power_of_2(trees.max_num_nodes + 1),
    )
