# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that find the most likely token of each of a few rows."""

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.argmax import best_tokens, find_best_tokens

DEVICE = torch.device("cpu" if current_platform.is_cpu() else "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 97, 4096, 12289])
def test_ties_go_to_lowest_token(vocab_size: int, dtype: torch.dtype):
    torch.manual_seed(vocab_size)
    logits = torch.randint(-20, 20, (5, vocab_size)).to(DEVICE, dtype) / 4
    logits[1] = -torch.inf
    logits[2] = -0.0
    logits[3] -= 100.0
    logits[4, vocab_size // 2 :: 7] = torch.inf
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert find_best_tokens(logits).tolist() == wanted
    assert best_tokens(logits).tolist() == wanted


def test_non_contiguous_rows():
    logits = torch.randn(6, 5000, device=DEVICE)[:, :4097]
    assert torch.equal(find_best_tokens(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize("sign", [1.0, -1.0])  # of NaN's bits
def test_nan_row_gives_a_valid_token(sign: float):
    logits = torch.full((2, 5000), torch.nan, device=DEVICE)
    logits = logits.copysign(torch.tensor(sign, device=DEVICE))
    assert (find_best_tokens(logits) < 5000).all()
