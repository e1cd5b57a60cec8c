# SPDX-License-Identifier: Apache-2.0
"""Reference implementation of the draft tree kernels in plain Python and PyTorch."""

import heapq
from typing import NamedTuple

import torch

from vllm.v1.worker.gpu.spec_decode.unified.tree.attend import Scores


class Node(NamedTuple):
    parent: int  # row of the parent, 0 for the last token
    depth: int
    rank: int


def best_first(
    log_probs: list[list[list[float]]],
    num_nodes: int,
    num_chain: int = 0,
    next_rows: list[list[list[int]]] | None = None,
) -> tuple[list[Node], list[int]]:
    """Nodes of a tree, from node 1 on: the chain, then the likeliest remaining paths.

    Args:
        log_probs: of the candidates of each depth, best first, in rows: [K][P][C].
        num_chain: nodes of the chain, which come first whatever their probability.
        next_rows: [K][P][C], the row of those after each candidate, -1 if there are
            none; None: the first one.

    Returns:
        The nodes, and the row that each one's candidate is in.
    """
    nodes: list[Node] = []
    rows, after, frontier = [], [0], []  # after: of each row of the tree

    def offer(above: float, parent: int, depth: int, rank: int) -> None:
        row = after[parent]
        if depth <= len(log_probs) and row >= 0:
            found = log_probs[depth - 1][row]
            if rank < len(found):
                score = above + found[rank]
                heapq.heappush(frontier, (-score, parent, depth, rank, above))

    def take(parent: int, depth: int, rank: int) -> None:
        row = after[parent]
        nodes.append(Node(parent, depth, rank))
        rows.append(row)
        after.append(next_rows[depth - 1][row][rank] if next_rows else 0)

    above = 0.0
    for depth in range(num_chain):
        offer(above, depth, depth + 1, 1)
        above += log_probs[depth][after[depth]][0]
        take(depth, depth + 1, 0)
    offer(above, num_chain, num_chain + 1, 0)
    while frontier and len(nodes) < num_nodes:
        score, parent, depth, rank, above = heapq.heappop(frontier)
        take(parent, depth, rank)
        offer(above, parent, depth, rank + 1)
        offer(-score, len(nodes), depth + 1, 0)
    return nodes, rows


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
    """Sampled tokens and the rows of the accepted path, from row 0 on: of each row, its
    token and the one that the target has drawn after it are known.

    With `chain_only` only best tokens, in consecutive rows, are accepted.
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
    weighing: Scores,
    seen: torch.Tensor,
    places: torch.Tensor,
) -> torch.Tensor:
    """Attention of one request: [q, heads, size] float32.

    Args:
        query: [q, heads, size].
        keys: [k, kv_heads, size], as `values`.
        seen: [q, n] bool, which of the last n keys a query attends to. It attends to
            all keys before these.
        places: [n], of these keys, of which the queries' are the last: how many tokens
            they are after the others. A window goes by them.
    """
    prefix, window = len(keys) - len(places), weighing.window
    if window:
        at = torch.cat([torch.arange(-prefix, 0), places])
        seen = torch.cat([torch.ones(len(seen), prefix, dtype=torch.bool), seen], 1)
        seen = seen & (at > places[-len(seen) :, None] - window)
    scores = scores_of(query, keys, weighing)
    own = scores[..., len(keys) - seen.shape[1] :]
    own.masked_fill_(~seen.to(own.device), -torch.inf)
    if (sinks := weighing.sinks) is not None:
        sinks = sinks[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    groups = query.shape[1] // keys.shape[1]
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(groups, 1))


def scores_of(
    query: torch.Tensor, keys: torch.Tensor, weighing: Scores
) -> torch.Tensor:
    """[heads, q, k]."""
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * weighing.scale
    softcap = weighing.softcap
    return softcap * (scores / softcap).tanh() if softcap else scores
