# SPDX-License-Identifier: Apache-2.0
"""Drafts a tree: candidates of each position, and the best combinations of them."""

from typing import TYPE_CHECKING

import torch

from vllm.config.drafter import num_candidates

from .candidates import best_candidates
from .topology import grow_trees

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.unified.plan import DraftPlan
    from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator


def sample_tree(
    speculator: "UnifiedSpeculator",
    rows: torch.Tensor,
    plan: "DraftPlan",
    draft_pass: int,
) -> None:
    """Drafts each request's tree; used instead of `sampling.sample_chain`.

    Args:
        rows: [n, K, H], hidden states of the sampled slots of the only pass.
    """
    n, depth = rows.shape[:2]
    batch = speculator.buffers.batch
    log_probs, tokens = rank_candidates(speculator, rows, plan)
    step = speculator.tree_step
    grow_trees(
        log_probs,
        tokens,
        batch.sample_requests[: n * depth],
        batch.idx_mapping[:n],
        step.rows.chain_only,
        step.trees,
        speculator.draft_tokens[:n],
        plan.num_drafts,
    )


def rank_candidates(
    speculator: "UnifiedSpeculator", rows: torch.Tensor, plan: "DraftPlan"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and tokens in the target's ids, [n * K, C] each; see
    `best_candidates`."""
    vocabulary = speculator.drafter.vocabulary
    count = min(num_candidates(plan.num_drafts), vocabulary.size)
    parts = []
    for part in speculator.slices(*rows.shape[:2]):
        logits = speculator.compute_draft_logits(rows[part].flatten(0, 1), 0)
        log_probs, tokens = best_candidates(logits, count)
        parts.append((log_probs, vocabulary.target_ids(tokens)))
    if len(parts) == 1:
        return parts[0]
    log_probs, tokens = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(tokens)
