# SPDX-License-Identifier: Apache-2.0
"""The candidates of a block that is drafted in one pass, from which trees are grown.

A block's positions are independent (DFlash, arXiv 2602.06036), or a small head scores
each candidate after each one of the position before (DFlash2, LiLiCorr, DSpark): a
lattice of C x C edges a depth, without another pass of the draft model.
"""

from typing import NamedTuple

import torch

from .grow import grow_trees
from .step import TreeStep


class Scores(NamedTuple):
    """Scores of a block's candidates, of n requests.

    Attributes:
        tokens: [n, K, P, C], the candidates, in the target's ids. P is 1 if positions
            are independent, else C: after each candidate of the position before. At
            the first position all C rows are equal.
        log_probs: [n, K, P, C] float32, best first.
        order: [n, K, C, C], the number of each candidate, which is the row of those
            after it; None if positions are independent.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    order: torch.Tensor | None = None


def of_edges(tokens: torch.Tensor, edges: torch.Tensor) -> Scores:
    """Scores of a lattice.

    Args:
        tokens: [n, K, C], candidates.
        edges: [n, K, C, C], score of each (last) after each of the position before, up
            to a constant of each row.
    """
    # Ties go to the first candidate, as in the chain.
    edges, order = edges.float().sort(dim=-1, descending=True, stable=True)
    tokens = tokens[:, :, None].expand(order.shape).gather(-1, order)
    return Scores(tokens, edges.log_softmax(-1), order)


class Lattice:
    """Scores at fixed addresses: a CUDA graph of any batch writes them, and trees of
    all sizes are grown from them after it.

    Args:
        max_num_reqs: requests of the largest batch (R).
        depth: positions of a block (K).
        num_candidates: of each position (C).
        is_conditional: whether candidates are scored after each of the position before.
    """

    def __init__(
        self,
        max_num_reqs: int,
        depth: int,
        num_candidates: int,
        is_conditional: bool,
        device: torch.device,
    ):
        rows = num_candidates if is_conditional else 1
        shape = max_num_reqs, depth, rows, num_candidates
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.order = None
        if is_conditional:
            self.order = torch.zeros(shape, dtype=torch.int32, device=device)

    def keep(self, scores: Scores) -> None:
        n = len(scores.tokens)
        self.tokens[:n].copy_(scores.tokens)
        self.log_probs[:n].copy_(scores.log_probs)
        if self.order is not None:
            self.order[:n].copy_(scores.order)

    def grow(
        self,
        num_drafts: int,
        sample_requests: torch.Tensor,
        idx_mapping: torch.Tensor,
        step: TreeStep,
        drafts: torch.Tensor,
    ) -> None:
        """Drafts the tree of each request.

        Args:
            sample_requests: [n, K] int64, -1 where a position must not be drafted.
            idx_mapping: [n] int64, request state.
            step: its trees are written.
            drafts: [n, at least num_drafts] int64, written.
        """
        n = len(idx_mapping)
        grow_trees(
            self.log_probs[:n],
            self.tokens[:n],
            sample_requests,
            idx_mapping,
            step.rows.chain_only,
            step.trees,
            drafts,
            num_drafts,
            None if self.order is None else self.order[:n],
        )
