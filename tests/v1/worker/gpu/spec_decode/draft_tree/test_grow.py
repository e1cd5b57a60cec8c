# SPDX-License-Identifier: Apache-2.0
"""Trees grown from candidates, beside `reference.py`."""

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode.unified.drafters.dflash import (
    block_lengths,
    of_edges,
)
from vllm.v1.worker.gpu.spec_decode.unified.tree.grow import Candidates, grow_trees
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import DraftTrees

from ..batches import DEVICE
from .reference import Node, best_first
from .test_beams import Passes

R, K = 8, 4  # request states, and depth


def assert_likeliest(
    candidates: Candidates,
    num_nodes: int,
    states: list[int],  # of each request; -1 for padding
    chain_only: list[bool],
    drafted: list[int] | None = None,  # how many positions of each may be
) -> None:
    """Grows trees, and compares them with the reference's."""
    n, drafted = len(states), drafted or [K] * len(states)
    trees = DraftTrees.chains(R, K, num_nodes, DEVICE)
    requests = torch.full((n, K), -1, device=DEVICE)
    for req, count in enumerate(drafted):
        requests[req, :count] = states[req]
    drafts = torch.full((n, num_nodes), -7, device=DEVICE)
    of_requests = (torch.tensor(each, device=DEVICE) for each in (states, chain_only))
    grow_trees(candidates, requests, *of_requests, trees, drafts, num_nodes)
    tables = [None if table is None else table.tolist() for table in candidates]
    for req, state in enumerate(states):
        if state < 0:
            assert (drafts[req] == -7).all()
            continue
        log_probs, tokens, next_rows = (table and table[req] for table in tables)
        # Past the drafter's context there are only nodes of the chain.
        past = K - drafted[req]
        log_probs = log_probs[: drafted[req]] + [[[-1e9]]] * past
        num_chain = K if chain_only[req] or past else 0
        nodes, rows = best_first(log_probs, num_nodes, num_chain, next_rows)
        wanted = [
            (node, tokens[node.depth - 1][row][node.rank])
            for at, (node, row) in enumerate(zip(nodes, rows, strict=True))
            if at < num_chain or node.depth <= drafted[req]
        ]
        of_state = (trees.parents, trees.depths, trees.ranks)
        columns = (column[state].tolist() for column in of_state)
        found = [Node(*node) for node in zip(*columns, strict=True)]
        found = list(zip(found, drafts[req].tolist(), strict=True))
        assert found[: len(wanted)] == wanted
        behind = found[len(wanted) :]
        assert all(node.parent == -1 and token == 0 for node, token in behind)


@pytest.mark.parametrize("num_nodes", [4, 7, 15, 31, 64, 127])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_trees_hold_likeliest_paths(num_nodes: int, count: int):
    """One request is padding; the last positions of one must not be drafted."""
    states, drafted = [5, -1, 0, 2, 7], [4, 4, 2, 4, 4]
    torch.manual_seed(num_nodes * 17 + count)
    logits = torch.randn(len(states), K, 1, 50, device=DEVICE) * 2
    log_probs, tokens = logits.log_softmax(-1).topk(count)
    chain_only = [False, False, False, True, False]
    found = Candidates(log_probs, tokens.int())
    assert_likeliest(found, num_nodes, states, chain_only, drafted)


@pytest.mark.parametrize("num_nodes", [4, 15, 31, 127])
@pytest.mark.parametrize("count", [4, 16])
def test_trees_of_lattices_hold_likeliest_paths(num_nodes: int, count: int):
    torch.manual_seed(num_nodes + count)
    shape = 3, K, count, count
    edges = (torch.randn(shape, device=DEVICE) * 2).round(decimals=1)  # some ties
    tokens = torch.randint(99, shape[:3], device=DEVICE)
    log_probs, found, order = of_edges(tokens, edges)
    assert found.equal(tokens[:, :, None].expand(shape).gather(-1, order))
    torch.testing.assert_close(log_probs, edges.log_softmax(-1).gather(-1, order))
    candidates = Candidates(log_probs, found.int(), order.int())
    assert_likeliest(candidates, num_nodes, [5, 0, 2], [False, True, False])


@pytest.mark.parametrize("num_nodes", [4, 15, 60])
def test_trees_of_beams_hold_likeliest_paths(num_nodes: int):
    beams = Passes(K).beams
    candidates = beams.candidates.of_first(3, K)
    assert_likeliest(candidates, num_nodes, [5, 0, 2], [False, True, False])


@pytest.mark.parametrize(
    "depth, lengths, blocks",
    [
        (7, [0, 1, 2, 3, 4, 5, 7, 31, 63], [3, 7]),
        (12, [0, 1, 2, 3, 4, 5, 7, 9, 12], [3, 7, 12]),  # 6 has no graphs
        (7, [1, 7, 63], [1, 7]),
        (4, [2, 15], [2]),
        (7, [0, 63], []),
    ],
)
def test_chains_have_a_block_of_a_length_that_steps_have(depth, lengths, blocks):
    assert block_lengths(depth, lengths) == blocks
