# SPDX-License-Identifier: Apache-2.0
"""Acceptance on greedy target text, without running speculative decoding.

While drafts are accepted, the draft model's context is the target's own text: so
teacher forcing tells exactly which drafts would have been accepted.
"""

import torch

from .distill import HELD_OUT_PROMPT
from .settings import EOS_ID, K


def from_hits(hits: torch.Tensor, ids: torch.Tensor) -> dict[str, object]:
    """Replay speculative decoding over known hits.

    Args:
        hits: [rows, length, K] bool; ``hits[r, t, k]`` says that with ``ids[r, t]``
            as the newest token, draft k is ``ids[r, t + 1 + k]``.
        ids: [rows, length] greedy text of the target.
    """
    accepted = []
    for row, text in zip(hits.cpu(), ids.cpu(), strict=True):
        accepted += _replay(row, _end(text))
    per_position = [
        round(sum(a > k for a in accepted) / max(1, len(accepted)), 3) for k in range(K)
    ]
    return {
        "estimated_acceptance_length": round(1 + sum(per_position), 3),
        "estimated_acceptance_by_position": per_position,
    }


def _end(text: torch.Tensor) -> int:
    ends = (text[HELD_OUT_PROMPT:] == EOS_ID).nonzero()
    return HELD_OUT_PROMPT + int(ends[0]) if len(ends) else len(text)


def _replay(hits: torch.Tensor, end: int) -> list[int]:
    """Drafts accepted in each step, ``hits`` being one row's [length, K]."""
    runs = hits.int().cumprod(-1).sum(-1).tolist()
    steps = []
    at = HELD_OUT_PROMPT
    while at + K < end:
        steps.append(runs[at])
        at += runs[at] + 1
    return steps


def hits_of_next(correct: torch.Tensor) -> torch.Tensor:
    """Hits of an autoregressive draft model.

    Args:
        correct: [rows, length - 1] bool, whether position t predicts token t + 1.
    """
    padded = torch.nn.functional.pad(correct, (0, K))
    return padded.unfold(1, K, 1)
