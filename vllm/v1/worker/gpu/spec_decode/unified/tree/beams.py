# SPDX-License-Identifier: Apache-2.0
"""Beams: trees of drafters that draft one depth in each pass.

Each pass continues the B likeliest open nodes of the depth that the pass before has
scored (EAGLE-2, arXiv 2406.16858); `grow.py` then takes the best nodes of all. The
first beam continues the chain of best tokens whatever its probability, for requests
that can only use a chain. With one beam the tree is a chain with siblings.

Beams of a pass share a position. The KV of beam j of pass p (from 1 on) follows that of
the verified tokens at place (p - 1) * B + j, and each beam attends to the verified
tokens and to its ancestors, by the masks of tree attention. None of this KV is kept:
the first pass of the next step writes that of the accepted tokens.
"""

from typing import Any

import torch

from vllm.config.drafter import CANDIDATES_OF_PASS
from vllm.triton_utils import tl, triton

from ..input_kernel import PreviousDrafts
from .grow import Candidates
from .trees import TreeAttention, TreeRows


@triton.jit(do_not_specialize=["depth"])
def _extend_kernel(
    log_probs,  # [n, ROWS, COUNT] float32
    tokens,  # [n, ROWS, COUNT] int
    sample_requests,  # [n] int64
    kept,  # Candidates
    kept_requests,  # [R, K] int64
    scores,  # [R, B] float32
    parents,  # [R, B] int32
    beam_tokens,  # [R, B] int64
    masks,  # [R * B, 2] int64
    depths,  # [R * B] int32
    draft_tokens,  # [n, >= K] int64
    draft_stride,
    depth,
    ROWS: tl.constexpr,  # 1 at the first depth, else B
    IS_FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,  # a power of two, as C
    C: tl.constexpr,
):
    req, lane = tl.program_id(0), tl.arange(0, B * C)
    row, rank = lane // C, lane % C
    inside, found = (row < ROWS) & (rank < COUNT), (req * ROWS + row) * COUNT + rank
    log_prob = tl.load(log_probs + found, mask=inside, other=float("-inf"))
    token = tl.load(tokens + found, mask=inside, other=0).to(tl.int32)
    place = req * K + depth
    tl.store(kept.log_probs + place * B * C + lane, log_prob)
    tl.store(kept.tokens + place * B * C + lane, token)
    tl.store(kept_requests + place, tl.load(sample_requests + req))
    best = tl.load(tokens + req * ROWS * COUNT)
    tl.store(draft_tokens + req * draft_stride + depth, best.to(tl.int64))

    beam = tl.arange(0, B)
    score = log_prob
    if not IS_FIRST:
        score += tl.load(scores + req * B + row)
    next_row = tl.full([B * C], -1, tl.int32)
    parent = tl.zeros([B], tl.int32)
    new_score = tl.full([B], float("-inf"), tl.float32)
    new_token = tl.zeros([B], tl.int32)
    for j in tl.static_range(B):
        pick = 0 if j == 0 else tl.argmax(score, 0)
        hit = lane == pick
        total = tl.max(tl.where(hit, score, float("-inf")), 0)
        # The chain goes on in any case.
        is_open = (total > float("-inf")) | (j == 0)
        next_row = tl.where(hit & is_open, j, next_row)
        parent = tl.where(beam == j, pick // C, parent)
        new_score = tl.where(beam == j, total, new_score)
        picked = tl.sum(tl.where(hit, token, 0), 0)
        new_token = tl.where(beam == j, picked, new_token)
        score = tl.where(hit, float("-inf"), score)
    tl.store(kept.next_rows + place * B * C + lane, next_row)
    tl.store(scores + req * B + beam, new_score)
    tl.store(parents + req * B + beam, parent)
    tl.store(beam_tokens + req * B + beam, new_token.to(tl.int64))
    tl.store(depths + req * B + beam, depth + 0 * beam)

    to = (req * B + beam) * 2
    number = depth * B + beam
    bit = tl.full([B], 1, tl.int64) << (number % 64).to(tl.int64)
    low, high = tl.where(number < 64, bit, 0), tl.where(number < 64, 0, bit)
    if not IS_FIRST:
        above = (req * B + parent) * 2
        low |= tl.load(masks + above)
        high |= tl.load(masks + above + 1)
        tl.debug_barrier()  # until all have read
    tl.store(masks + to, low)
    tl.store(masks + to + 1, high)


class Beams:
    """The candidates of each depth, by request of the batch, and the nodes that the
    next pass continues; all at fixed addresses.

    Args:
        max_num_reqs: requests of the largest batch (R).
        max_depth: of trees (K).
        num_beams: nodes that a pass continues (B), a power of two.

    Attributes:
        candidates: [R, K, B, C], after each beam; at the first depth those of row 0
            alone. Rows are beams.
        sample_requests: [R, K] int64, -1 where a depth must not be drafted.
        rows: which rows the beams attend to.
    """

    def __init__(
        self, max_num_reqs: int, max_depth: int, num_beams: int, device: torch.device
    ):
        def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(max_num_reqs, *shape, dtype=dtype, device=device)

        self.max_depth, self.num_beams = max_depth, num_beams
        shape = max_num_reqs, max_depth, num_beams, CANDIDATES_OF_PASS
        self.candidates = Candidates.zeros(shape, True, device)
        self.sample_requests = new(max_depth, dtype=torch.int64).fill_(-1)
        self.rows = TreeRows(max_num_reqs, max_num_reqs * num_beams, device)
        self._scores = new(num_beams, dtype=torch.float32)
        self._parents = new(num_beams)
        self._tokens = new(num_beams, dtype=torch.int64)

    def extend(
        self,
        depth: int,
        log_probs: torch.Tensor,
        tokens: torch.Tensor,
        sample_requests: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """Keeps the candidates of a pass, and chooses what the next one continues.

        Args:
            depth: of the pass, from 0.
            log_probs: [n, B, 1, at most C] float32, best first; of the first pass
                [n, 1, 1, at most C].
            tokens: as log_probs, any integer dtype.
            sample_requests: [n] int64.
            drafts: [n, at least K] int64, column `depth` gets the best token of the
                first row.
        """
        num_reqs, num_rows, _, count = log_probs.shape
        assert log_probs.is_contiguous() and tokens.is_contiguous()
        assert num_rows == (self.num_beams if depth else 1)
        assert count <= CANDIDATES_OF_PASS and len(sample_requests) == num_reqs
        _extend_kernel[(num_reqs,)](
            log_probs,
            tokens,
            sample_requests,
            self.candidates,
            self.sample_requests,
            self._scores,
            self._parents,
            self._tokens,
            self.rows.masks,
            self.rows.depths,
            drafts,
            drafts.stride(0),
            depth,
            ROWS=num_rows,
            IS_FIRST=depth == 0,
            COUNT=count,
            K=self.max_depth,
            B=self.num_beams,
            C=CANDIDATES_OF_PASS,
            num_warps=1,
        )

    def previous(self, num_reqs: int) -> PreviousDrafts:
        """What a later pass continues from."""
        return PreviousDrafts(self._tokens[:num_reqs], self._parents[:num_reqs])

    def attach(
        self, attn_metadata: dict[str, Any], draft_pass: int, seq_lens: torch.Tensor
    ) -> None:
        """Makes the draft model's layers attend by the masks.

        Args:
            draft_pass: from 1 on.
            seq_lens: [n] int32, KV of the verified tokens and of all beams so far.
        """
        n, b = len(seq_lens), self.num_beams
        if draft_pass == 1:  # the others have the same
            torch.clamp(seq_lens - b, min=0, out=self.rows.prefix_lens[:n])
        before = (draft_pass - 1) * b
        tree = TreeAttention(self.rows, n, n * b, True, b, before)
        for metadata in attn_metadata.values():
            metadata.draft_tree = tree
