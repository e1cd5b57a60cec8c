# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p (nucleus sampling, arXiv 1904.09751) without sorting the vocabulary.

On a CPU sorting takes most of the time of a sampled decode step: 7 ms for each row of
152k logits, and every draft has a row. The tokens that text leaves to choose from are
mostly few, and finding the largest logits takes a tenth of that.
"""

from collections.abc import Callable

import torch

MOST = 1024  # tokens that are looked at
WORTH = 8 * MOST  # smaller vocabularies are sorted as fast

Mask = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]


def apply_top_k_top_p_to_largest(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor, by_sorting: Mask
) -> torch.Tensor:
    """Masks the tokens outside of top-k, then top-p.

    Args:
        logits: [N, V] float32.
        k: [N], how many tokens to keep; V: all. Others with the logit of the last one
            are kept, too.
        p: [N], the least probability of the kept tokens together; 1: keep all.
        by_sorting: does the same, also if more than `MOST` tokens are to be kept.

    Returns:
        [N, V] float32, -inf where masked.
    """
    vocab_size = logits.shape[1]
    if vocab_size < WORTH:
        return by_sorting(logits, k, p)
    largest, tokens = logits.topk(MOST)
    kept = torch.ones_like(largest, dtype=torch.bool)
    total = logits.logsumexp(-1, keepdim=True)
    is_cut, is_whole = torch.zeros_like(p, dtype=torch.bool)[:, None], True
    needs_mask = p < 1
    if k is not None:
        needs_mask |= k < vocab_size
        is_whole = (k >= vocab_size)[:, None]
        last = largest.gather(1, k.long().clamp(max=MOST)[:, None] - 1)
        # If it is among the smallest of these, there may be more with its logit.
        is_cut = (k[:, None] <= MOST) & (last > largest[:, -1:])
        kept = ~is_cut | (largest >= last)
        of_kept = largest.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
        total = torch.where(is_cut, of_kept, total)
    chances = (largest - total).exp()
    sums = chances.cumsum(-1)
    kept &= sums - chances < p[:, None]
    kept[:, 0] = True
    masked = torch.full_like(logits, -torch.inf)
    masked.scatter_(1, tokens, largest.masked_fill(~kept, -torch.inf))
    # `total` is not that of the tokens that a longer top-k keeps.
    is_few = is_cut | (is_whole & (sums[:, -1:] >= p[:, None]))
    if not is_few.all():
        masked = torch.where(is_few, masked, logits)
        if (rows := (~is_few.squeeze(1) & needs_mask).nonzero().flatten()).numel():
            given = (None if k is None else k[rows], p[rows])
            masked[rows] = by_sorting(logits[rows], *given)
    return masked
