# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the draft tree kernels in plain Python and PyTorch."""

import heapq
from typing import NamedTuple

import torch


class Node(NamedTuple):
    parent: int  # row of the parent, 0 for the last token
    depth: int
    rank: int


def best_first(
    log_probs: list[list[float]],
    num_nodes: int,
    num_chain: int = 0,
    continues_best: bool = False,
) -> list[Node]:
    """Nodes of a tree, from node 1 on: the chain, then the likeliest remaining paths.

    Args:
        log_probs: of the candidates of each drafted depth, best first.
        num_chain: nodes of the chain, which come first whatever their probability.
        continues_best: whether only the best node of a depth may have children.
    """
    chain = [Node(depth, depth + 1, 0) for depth in range(num_chain)]
    nodes, frontier = list(chain), []

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        if depth <= len(log_probs) and rank < len(log_probs[depth - 1]):
            score = above + log_probs[depth - 1][rank]
            heapq.heappush(frontier, (-score, parent, depth, rank, above))

    above = 0.0
    for node in chain:
        offer(above, node.parent, node.depth, 1)
        above += log_probs[node.depth - 1][0]
    offer(above, num_chain, num_chain + 1, 0)
    while frontier and len(nodes) < num_nodes:
        score, parent, depth, rank, above = heapq.heappop(frontier)
        nodes.append(Node(parent, depth, rank))
        offer(above, parent, depth, rank + 1)
        if rank == 0 or not continues_best:
            offer(-score, len(nodes), depth + 1, 0)
    return nodes


def best_first_of_lattice(
    edges: torch.Tensor, num_nodes: int, num_chain: int = 0
) -> tuple[list[Node], list[int]]:
    """As `best_first`, by scores after each candidate; and each node's candidate.

    Args:
        edges: [K, C, C], of each candidate (last) after each of the depth before.
    """
    ranked = edges.sort(dim=-1, descending=True, stable=True)
    nodes, taken, frontier = [], [0], []

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        if depth <= len(edges) and rank < edges.shape[-1]:
            score = above + float(ranked.values[depth - 1, taken[parent], rank])
            heapq.heappush(frontier, (-score, parent, depth, rank, above))

    def take(parent: int, depth: int, rank: int) -> None:
        nodes.append(Node(parent, depth, rank))
        taken.append(int(ranked.indices[depth - 1, taken[parent], rank]))

    above = 0.0
    for depth in range(num_chain):
        take(depth, depth + 1, 0)
        offer(above, depth, depth + 1, 1)
        above += float(edges[depth, taken[depth], taken[depth + 1]])
    offer(above, num_chain, num_chain + 1, 0)
    while frontier and len(nodes) < num_nodes:
        score, parent, depth, rank, above = heapq.heappop(frontier)
        take(parent, depth, rank)
        offer(above, parent, depth, rank + 1)
        offer(-score, len(nodes), depth + 1, 0)
    return nodes, taken[1:]


def ancestors(nodes: list[Node], row: int) -> set[int]:
    """Rows that a row attends to: itself, its ancestors, and row 0."""
    seen = {0, row}
    while row > 0:
        row = nodes[row - 1].parent
        seen.add(max(row, 0))
    return seen


def walk(
    nodes: list[Node], tokens: list[int], drawn: list[int], chain_only: bool
) -> tuple[list[int], list[int]]:
    """Sampled tokens and the rows of the accepted path, from row 0 on.

    Args:
        tokens: of each row; row 0's is ignored.
        drawn: the target's token after each row.
        chain_only: only the chain of best tokens, in consecutive rows, is accepted.
    """
    path, sampled = [0], []
    while True:
        sampled.append(drawn[path[-1]])
        for row, node in enumerate(nodes[: len(tokens) - 1], start=1):
            if chain_only and node != Node(row - 1, node.depth, 0):
                continue
            if node.parent == path[-1] and tokens[row] == sampled[-1]:
                path.append(row)
                break
        else:
            return sampled, path


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Attention of one request: [q, heads, size] float32.

    Args:
        query: [q, heads, size].
        keys: [k, kv_heads, size], as `values`.
        seen: [q, n] bool, which of the last n keys a query attends to. It attends to
            all keys before these.
    """
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    own = scores[..., len(keys) - seen.shape[1] :]
    own.masked_fill_(~seen.to(own.device), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
