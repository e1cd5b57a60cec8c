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
    """Drafts each request's tree, or keeps the candidates of one of several passes;
    used instead of `sampling.sample_chain`.

    Args:
        rows: [n, W, H], hidden states of the sampled slots of the pass.
    """
    n, samples = rows.shape[:2]
    batch, step = speculator.buffers.batch, speculator.tree_step
    log_probs, tokens = rank_candidates(speculator, rows, plan, draft_pass)
    requests, drafts = batch.sample_requests[: n * samples], speculator.draft_tokens[:n]
    if plan.layout.num_passes > 1:
        step.candidates.keep(draft_pass, log_probs, tokens, requests, drafts)
        return
    grow_trees(
        log_probs.view(n, samples, -1),
        tokens.view(n, samples, -1),
        requests.view(n, samples),
        batch.idx_mapping[:n],
        step.rows.chain_only,
        step.trees,
        drafts,
        plan.num_drafts,
    )


def build_trees(
    speculator: "UnifiedSpeculator", plan: "DraftPlan", num_reqs: int
) -> None:
    """Builds the trees of a step once each of its passes has kept its candidates.

    This is no part of CUDA graphs, so trees of all sizes share them.
    """
    step, depth = speculator.tree_step, plan.layout.num_speculative_tokens
    grow_trees(
        step.candidates.log_probs[:num_reqs, :depth],
        step.candidates.tokens[:num_reqs, :depth],
        step.candidates.sample_requests[:num_reqs, :depth],
        speculator.buffers.batch.idx_mapping[:num_reqs],
        step.rows.chain_only,
        step.trees,
        speculator.draft_tokens[:num_reqs],
        plan.num_drafts,
        continues_best=True,
    )


def rank_candidates(
    speculator: "UnifiedSpeculator",
    rows: torch.Tensor,
    plan: "DraftPlan",
    draft_pass: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, and tokens in the target's ids, [n * W, C] each; see
    `best_candidates`."""
    vocabulary = speculator.drafter.vocabulary
    count = num_candidates(plan.num_drafts, plan.layout.num_passes == 1)
    count = min(count, vocabulary.size)
    parts = []
    for part in speculator.slices(*rows.shape[:2]):
        hidden = rows[part].flatten(0, 1)
        logits = speculator.compute_draft_logits(hidden, draft_pass)
        log_probs, tokens = best_candidates(logits, count)
        parts.append((log_probs, vocabulary.target_ids(tokens)))
    if len(parts) == 1:
        return parts[0]
    log_probs, tokens = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(tokens)
