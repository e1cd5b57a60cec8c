# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p under Triton's interpreter, and compiled on a GPU."""

import pytest
import torch

from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

NUM_REQS, VOCAB = 9, 50  # a batch size for which the Triton kernel would be used


def kept_tokens(logits: torch.Tensor, k: int, p: float) -> list[int]:
    """Sorted token ids that top-k, then top-p keep. logits: [VOCAB]."""
    order = logits.argsort(descending=True)[:k]
    chances = logits[order].softmax(-1)
    before = chances.cumsum(-1) - chances
    return sorted(order[before < p].tolist())


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("p", [None, 0.6])
def test_top_k_top_p(k: int | None, p: float | None, on_cpu: bool):
    device = "cpu" if on_cpu else "cuda"
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_REQS, VOCAB, generator=generator)
    given = [None if x is None else torch.full((NUM_REQS,), x) for x in (k, p)]
    given = [x if x is None else x.to(device) for x in given]
    found = apply_top_k_top_p(logits.clone().to(device), *given).cpu()
    for row, masked in zip(logits, found, strict=True):
        kept = masked.isfinite().nonzero().flatten().tolist()
        assert kept == kept_tokens(row, k or VOCAB, p or 2.0)
        assert torch.equal(masked[kept], row[kept])
