# SPDX-License-Identifier: Apache-2.0
"""Replay of recorded acceptance on a device, compared with a reference."""

import numpy as np
import pytest
import torch

from benchmarks.spec_decode.trace_acceptance import FIRST_TOKEN, Replay, start_of
from benchmarks.spec_decode.traces import NO_NODE, Trace
from tests.v1.worker.gpu.spec_decode.draft_tree.reference import Node, walk
from vllm.v1.worker.gpu.spec_decode.unified.tree.trees import DraftTrees

PROMPTS = np.random.default_rng(0).integers(0, 1000, (4, 20))
DEPTH, NODES = 8, 63


def random_trace(rows: int = 60) -> Trace:
    """Random trees, some with fewer nodes, and random paths in them."""
    rng = np.random.default_rng(0)
    parents = np.full((rows, NODES), NO_NODE, np.uint8)
    depths = np.zeros((rows, NODES + 1), int)
    for row, node in np.ndindex(rows, NODES - 3):
        above = np.flatnonzero(depths[row, : node + 1] < DEPTH)
        parents[row, node] = parent = rng.choice(above[-6:])
        depths[row, node + 1] = depths[row, parent] + 1
    return Trace(
        parents,
        rng.integers(0, NODES - 2, rows).astype(np.uint8),
        rng.integers(0, DEPTH + 1, rows).astype(np.uint8),
        rng.uniform(size=(rows, DEPTH)).astype(np.float32),
        np.array([rows - 9, 9]),
        {},
    )


def smaller(parents: list[int], reached: int, depth: int, num_nodes: int):
    """The first nodes that are not too deep, and those of the path, from row 0 on."""
    nodes, number = [Node(0, 0, 0)], {0: 0}  # of each node in the smaller tree
    for node, parent in enumerate(parents, 1):
        if parent in number and nodes[number[parent]].depth < depth:
            above = number[parent]
            rank = sum(each.parent == above for each in nodes[1:])
            number[node] = len(nodes)
            nodes.append(Node(above, nodes[above].depth + 1, rank))
    path = []
    while reached:
        path.append(number.get(reached, NO_NODE))
        reached = parents[reached - 1]
    kept = [node for node in reversed(path) if node <= num_nodes]
    return nodes[1 : num_nodes + 1], [0, *kept]


def test_rows_wrap_and_differ_by_prompt():
    replay = Replay("cpu", 4)
    replay.load(random_trace())
    replay.starts.copy_(torch.from_numpy(start_of(PROMPTS)))
    rows = replay.rows(replay.starts, torch.full((4,), 59))
    assert rows.tolist() == ((replay.starts + 59) % 60).tolist()
    assert len(set(rows.tolist())) == 4


@pytest.mark.parametrize("depth, num_nodes", [(8, 63), (8, 20), (6, 31), (2, 9)])
def test_trees_are_planted_as_recorded(depth, num_nodes):
    """The first nodes of a recorded tree are the smaller tree, less deep ones too."""
    trace, replay = random_trace(), Replay("cpu", 60)
    replay.load(trace)
    replay.starts.copy_(torch.arange(60))
    trees = DraftTrees.chains(60, DEPTH, NODES, torch.device("cpu"))
    drafts = torch.zeros(60, num_nodes, dtype=torch.int64)
    newest = torch.full((60,), 120)
    replay.plant(torch.arange(60), newest, drafts, trees, depth)
    for row, parents in enumerate(trace.parents.tolist()):
        reached = int(trace.reached[row])
        nodes, expected = smaller(parents, reached, depth, num_nodes)
        topology = trees.parents, trees.depths, trees.ranks
        found = [each[row, :num_nodes].tolist() for each in topology]
        assert list(zip(*found, strict=True))[: len(nodes)] == nodes
        assert set(found[0][len(nodes) :]) <= {-1}
        held, drawn = [-1, *drafts[row].tolist()], replay.drawn[row].tolist()
        _, path = walk(nodes, held, drawn, chain_only=False)
        assert path == expected
        assert trace.accepted(depth, num_nodes)[row] == len(path) - 1


@pytest.mark.parametrize("k", [1, 5, 8])
def test_chains_of_engines_with_trees(k):
    trace, replay = random_trace(), Replay("cpu", 60)
    replay.load(trace)
    drafts = torch.zeros(60, k, dtype=torch.int64)
    trees = DraftTrees.chains(60, DEPTH, NODES, torch.device("cpu"))
    replay.plant(torch.arange(60), torch.arange(60), drafts, trees, k)
    same = (replay.drawn[:, :k] == drafts).int().cumprod(1).sum(1)
    assert same.tolist() == np.minimum(trace.chain, k).tolist()
    assert (replay.drawn[:, k] == FIRST_TOKEN).all()
