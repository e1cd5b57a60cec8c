# SPDX-License-Identifier: Apache-2.0
"""The most likely token, or tokens, of each of a few rows."""

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.argmax import best_candidates, best_tokens

DEVICE = torch.device(current_platform.device_type)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [97, 4096, 12289])
@pytest.mark.parametrize("candidates", [1, 8, 16])
def test_candidates_are_the_best_tokens(candidates, vocab_size, dtype):
    """Ties go to the lowest token; some rows have adjacent best tokens, or -inf. On a
    CPU the best token alone is not found by a kernel."""
    torch.manual_seed(candidates)
    logits = torch.randint(-3, 3, (7, 2 * vocab_size)).to(dtype)
    logits = logits[:, :vocab_size]  # not contiguous
    logits[0] = torch.randperm(vocab_size) / 64.0
    logits[1] = -0.0
    logits[2] = -torch.inf
    logits[2, 17:24] = 1.0  # fewer than asked for
    logits[3, 64:96] += 10.0
    logits[4, ::3] = -torch.inf
    logits[5] = -torch.inf
    logits[6, vocab_size // 2 :: 7] = torch.inf
    log_probs, tokens = best_candidates(logits.to(DEVICE), candidates)
    wanted = logits.sort(dim=-1, descending=True, stable=True)
    assert tokens.tolist() == wanted.indices[:, :candidates].tolist()
    found = logits.float().gather(1, tokens.cpu().long()).log_softmax(-1)[:5]
    torch.testing.assert_close(log_probs[:5].cpu(), found, atol=1e-4, rtol=1e-4)
    best = best_tokens(logits.to(DEVICE))
    assert best.tolist() == wanted.indices[:, 0].tolist() and best.dtype == torch.int64


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("sign", [1.0, -1.0])  # of NaN's bits
@pytest.mark.parametrize("vocab_size", [17, 1536, 5000])
def test_nan_row_has_valid_candidates(vocab_size: int, sign: float, count: int):
    """Regression: a padding row of NaN got a token far outside the vocabulary."""
    logits = torch.randn(2, vocab_size, device=DEVICE)
    logits[1] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    _, tokens = best_candidates(logits, count)
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    assert tokens[0].tolist() == logits[0].topk(count).indices.tolist()
