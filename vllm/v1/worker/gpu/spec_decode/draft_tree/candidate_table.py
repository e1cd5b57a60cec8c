# SPDX-License-Identifier: Apache-2.0
"""Candidates of a tree that is drafted in several passes, one depth in each."""

import torch

from vllm.config.drafter.drafter import CANDIDATES_OF_PASS
from vllm.triton_utils import tl, triton


@triton.jit(do_not_specialize=["depth"])
def _keep_kernel(
    log_probs,  # [n, COUNT] float32
    tokens,  # [n, COUNT]
    sample_requests,  # [n] int64
    kept_log_probs,  # [R, K, C] float32
    kept_tokens,  # [R, K, C] int32
    kept_requests,  # [R, K] int64
    draft_tokens,  # [n, >= K] int64
    draft_stride,
    depth,
    K: tl.constexpr,
    C: tl.constexpr,  # a power of two
    COUNT: tl.constexpr,
):
    req, lane = tl.program_id(0), tl.arange(0, C)
    inside, place = lane < COUNT, req * K + depth
    found = req * COUNT + lane
    log_prob = tl.load(log_probs + found, mask=inside, other=float("-inf"))
    token = tl.load(tokens + found, mask=inside, other=0)
    tl.store(kept_log_probs + place * C + lane, log_prob)
    tl.store(kept_tokens + place * C + lane, token.to(tl.int32))
    tl.store(kept_requests + place, tl.load(sample_requests + req))
    best = tl.load(tokens + req * COUNT)
    tl.store(draft_tokens + req * draft_stride + depth, best.to(tl.int64))


class CandidateTable:
    """Candidates by request of the batch and depth, at fixed addresses.

    Args:
        max_num_reqs: requests of the largest batch (R).
        max_depth: of trees (K).

    Attributes:
        log_probs: [R, K, C] float32, best first.
        tokens: [R, K, C] int32.
        sample_requests: [R, K] int64, -1 where a depth must not be drafted.
    """

    def __init__(self, max_num_reqs: int, max_depth: int, device: torch.device):
        shape = (max_num_reqs, max_depth, CANDIDATES_OF_PASS)
        self.log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self.sample_requests = torch.full(
            shape[:2], -1, dtype=torch.int64, device=device
        )

    def keep(
        self,
        depth: int,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        sample_requests: torch.Tensor,
        draft_tokens: torch.Tensor,
    ) -> None:
        """Keeps the candidates of a pass, and drafts the best of them.

        Args:
            depth: of the pass, from 0.
            log_probs: [n, at most C] float32, best first.
            tokens: [n, as many], any integer dtype.
            sample_requests: [n] int64.
            draft_tokens: [n, at least K] int64, column `depth` is written.
        """
        num_reqs, count = log_probs.shape
        _, max_depth, num_candidates = self.tokens.shape
        assert count <= num_candidates and log_probs.is_contiguous()
        assert tokens.is_contiguous() and len(sample_requests) == num_reqs
        _keep_kernel[(num_reqs,)](
            log_probs,
            tokens,
            sample_requests,
            self.log_probs,
            self.tokens,
            self.sample_requests,
            draft_tokens,
            draft_tokens.stride(0),
            depth,
            K=max_depth,
            C=num_candidates,
            COUNT=count,
            num_warps=1,
        )
