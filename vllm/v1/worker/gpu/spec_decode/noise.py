# SPDX-License-Identifier: Apache-2.0
"""Which random numbers of a request's stream a draw uses, and why.

The base makes a draw's noise of the request's seed, the position before the token and
the token itself. Position p is thus the key of the token that the target, drafting
nothing, draws after position p.

Request with a seed: its token after p is always that one, with drafts or without, so
that nothing else in the batch, preemption or another number of drafts can change it.
Drafts are drawn with the same key: where drafter and target agree, so do the draws.

Request without: a draft is accepted by the ratio of probabilities, which asks for noise
that the draft has not seen. Verification has keys of its own.

Block verification looks at drafts and draws past the one it rejects. The next step must
not meet them again, so with it a key belongs to one step alone.
"""

import torch

from vllm.v1.worker.gpu.sample.gumbel import _DRAFT_NOISE_SALT, gumbel_sample

# The base adds this to a draft's key. Without Triton it is a plain number.
DRAFT_SALT = int(getattr(_DRAFT_NOISE_SALT, "value", _DRAFT_NOISE_SALT))
# Positions stay far below, and so do positions times the most drafts of a step.
VERIFY_SALT = DRAFT_SALT // 2


def draft_keys(
    positions: torch.Tensor, columns: torch.Tensor, num_drafts: int, block: bool
) -> torch.Tensor:
    """[n] int64 keys of drafts, to which the base adds DRAFT_SALT.

    Args:
        positions: [n] int64, the position before each draft's own.
        columns: [n] int32, which draft of its step it is, from 0.
        num_drafts: the most of a step (K).
        block: whether they will be verified as a block.
    """
    if block:
        return positions + (positions - columns) * num_drafts
    return positions - DRAFT_SALT


def verify_keys(
    positions: torch.Tensor, columns: torch.Tensor, num_drafts: int, block: bool
) -> torch.Tensor:
    """[n] int64 keys of the draws that verify drafts; arguments as `draft_keys`."""
    if block:
        positions = positions + (positions - columns) * num_drafts
    return positions + VERIFY_SALT


def draw_alone(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    cu_num_logits: torch.Tensor,
    states: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_drafts: int,
    use_fp64: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that the target draws without drafts, as far as drafts foresaw them.

    Args:
        logits: [rows, V], processed, temperature included; a row before each draft of
            a request and one behind the last.
        drafts: [rows], the token that led to each row; negative is never accepted.
        positions: [rows] int64.
        cu_num_logits: [requests + 1] int32.
        states: [rows], request state of each row.
        temperature, seeds: [R], by request state.
        num_drafts: the most of a step (K).

    Returns:
        [requests, K + 1] int64 tokens, and [requests] int32, how many of them count.
    """
    drawn = gumbel_sample(
        logits,
        states,
        temperature,
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )
    steps = torch.arange(num_drafts + 1, device=drawn.device)
    last = cu_num_logits[1:, None] - 1
    rows = torch.minimum(cu_num_logits[:-1, None] + steps, last)
    tokens, has_draft = drawn[rows], rows < last
    foreseen = has_draft & (drafts[torch.where(has_draft, rows + 1, rows)] == tokens)
    return tokens, 1 + foreseen.int().cumprod(1).sum(1, dtype=torch.int32)
