# SPDX-License-Identifier: Apache-2.0
"""Trees of a lattice, beside `reference.py`."""

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified.tree.grow import grow_trees
from vllm.v1.worker.gpu.spec_decode.unified.tree.lattice import of_edges
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import DraftTrees

from .reference import Node, best_first
from .test_kernels import DEVICE, R, tensor


@pytest.mark.parametrize("num_nodes", [4, 15, 31, 127])
@pytest.mark.parametrize("candidates", [4, 16])
def test_lattices_hold_likeliest_paths(num_nodes: int, candidates: int):
    depth, states, chain_only = 4, [5, 0, 2], [False, True, False]
    torch.manual_seed(num_nodes + candidates)
    shape = len(states), depth, candidates, candidates
    scores = (torch.randn(shape, device=DEVICE) * 2).round(decimals=1)  # some ties
    tokens = torch.randint(99, shape[:3], device=DEVICE)
    found = of_edges(tokens, scores)
    trees = DraftTrees(R, depth, num_nodes, DEVICE)
    drafts = torch.zeros(len(states), num_nodes, dtype=torch.int64, device=DEVICE)
    grow_trees(
        found.log_probs,
        found.tokens.int(),
        tensor([[state] * depth for state in states], torch.int64),
        tensor(states, torch.int64),
        tensor(chain_only, torch.bool),
        trees,
        drafts,
        num_nodes,
        found.order.int(),
    )
    edges = found.log_probs.tolist(), found.order.tolist()
    for req, state in enumerate(states):
        num_chain = depth if chain_only[req] else 0
        log_probs, order = (each[req] for each in edges)
        nodes, taken = best_first(log_probs, num_nodes, num_chain, order)
        columns = (trees.parents[state], trees.depths[state], trees.ranks[state])
        rows = zip(*(column.tolist() for column in columns), strict=True)
        assert [Node(*row) for row in rows] == nodes
        wanted = [
            int(tokens[req, node.depth - 1, order[node.depth - 1][row][node.rank]])
            for node, row in zip(nodes, taken, strict=True)
        ]
        assert drafts[req].tolist() == wanted
