# SPDX-License-Identifier: Apache-2.0
"""Candidates of trees that are drafted in several passes."""

import pytest
import torch

from vllm.config.drafter.drafter import CANDIDATES_OF_PASS
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.unified.tree.grow import CandidateTable

DEVICE = torch.device("cpu" if current_platform.is_cpu() else "cuda")
R, K = 6, 4


@pytest.mark.parametrize("count", [3, CANDIDATES_OF_PASS])
def test_each_pass_keeps_its_candidates(count: int):
    """A small vocabulary has fewer candidates: the others are impossible."""
    torch.manual_seed(count)
    table, n = CandidateTable(R, K, DEVICE), R - 1
    drafts = torch.full((R, 9), -7, device=DEVICE)
    passes = []
    for depth in range(K):
        log_probs = torch.randn(n, count, device=DEVICE)
        tokens = torch.randint(0, 99, (n, count), device=DEVICE)
        requests = torch.randint(-1, R, (n,), device=DEVICE)
        table.keep(depth, log_probs, tokens, requests, drafts[:n])
        passes.append((log_probs, tokens, requests))
    wanted = [torch.stack(each, 1) for each in zip(*passes, strict=True)]
    assert table.log_probs[:n, :, :count].equal(wanted[0])
    assert table.tokens[:n, :, :count].equal(wanted[1].int())
    assert table.sample_requests[:n].equal(wanted[2])
    assert table.log_probs[:n, :, count:].eq(-torch.inf).all()
    # Each pass drafts its best candidate, the input of the next one.
    assert drafts[:n, :K].equal(wanted[1][..., 0])
    assert drafts[:n, K:].eq(-7).all()
    # Other requests are left alone.
    assert table.sample_requests[n:].eq(-1).all() and drafts[n:].eq(-7).all()
