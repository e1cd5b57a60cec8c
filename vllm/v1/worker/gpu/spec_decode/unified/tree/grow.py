# SPDX-License-Identifier: Apache-2.0
"""Builds each request's draft tree from the candidates, on the device.

A drafter that samples all positions in one pass gives a distribution for each of them.
The probability of a path is taken as the product over its nodes, and the tree holds the
N most likely paths. A node's probability never exceeds its parent's, so best-first
search (taking the best of a frontier again and again, as EAGLE-2, arXiv 2406.16858, and
DDTree build trees) finds exactly these, each parent before its children. So the first
nodes are a tree too, if fewer are verified. A request that can only use a chain has the
chain of best tokens as nodes 1 to K, whatever its probability; so has one near its last
position, if not all K drafts fit.

Each node is either the next sibling of a node that was taken (the next best token
after their parent) or the first child of one (the best token after it).

A lattice (`drafters/dflash.py`) gives a distribution after each candidate of the
position before, and an autoregressive drafter after each node that its passes continue:
there a position has several rows of candidates, and each candidate names the row of
those after it.

Such a pass continues B beams, the likeliest open nodes of the depth that the pass
before has scored; then the best nodes of all are taken. The first beam continues the
chain of best tokens whatever its probability, for requests that can only use a chain.
With one beam the tree is a chain with siblings. Beams of a pass share a position. The
KV of beam j of pass p (from 1 on) follows that of the verified tokens at place
(p - 1) * B + j, and each beam attends to the verified tokens and to its ancestors, by
the masks of tree attention. None of this KV is kept: the first pass of the next step
writes that of the accepted tokens.

Probabilities are a softmax over the candidates only (`argmax.py`): a drafter that
samples all positions at once is right more often than its probabilities say, and with
this softmax its trees grow deeper.
"""

from typing import Any, NamedTuple

import torch

from vllm.config.drafter import CANDIDATES_OF_PASS
from vllm.triton_utils import tl, triton

from ..input_kernel import PreviousDrafts
from .trees import DraftTrees, TreeAttention, TreeRows

NO_PARENT = tl.constexpr(-1)


class Candidates(NamedTuple):
    """Candidates of each position, best first, of n requests.

    Attributes:
        log_probs: [n, K, P, C] float32, in P rows.
        tokens: [n, K, P, C] int32, in the target's ids.
        next_rows: [n, K, P, C] int32, the row of the candidates after each one, -1 if
            there are none. Of the first position only row 0 is read, and the best
            candidate of each row of a chain names a row. None: there is one row.
    """

    log_probs: torch.Tensor
    tokens: torch.Tensor
    next_rows: torch.Tensor | None = None

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], names_rows: bool, device: torch.device
    ) -> "Candidates":
        ints = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(torch.zeros(shape, device=device), *ints[: 1 + names_rows])

    def of_first(self, num_reqs: int, depth: int) -> "Candidates":
        """The first positions of the first requests."""
        tables = (table for table in self if table is not None)
        return Candidates(*(table[:num_reqs, :depth] for table in tables))


@triton.jit
def _store_node(trees, draft, at, node, is_real, parent, depth, rank, token):
    """Node `node` (from 1) in column node - 1; one that is not real has no parent."""
    tl.store(trees.parents + at + node - 1, tl.where(is_real, parent, NO_PARENT))
    tl.store(trees.depths + at + node - 1, tl.where(is_real, depth, 1))
    tl.store(trees.ranks + at + node - 1, rank)
    tl.store(draft + node - 1, token.to(tl.int64))


# One compiled kernel grows trees of several sizes, which "auto" chooses from.
@triton.jit(do_not_specialize=["num_depths", "num_nodes"])
def _grow_kernel(
    candidates,  # Candidates; n rows of `table_stride` depths
    sample_requests,  # [n, K] int64, -1 where a position must not be drafted
    table_stride,
    idx_mapping,  # [n] int64, request state, -1 for padding
    chain_only,  # [n] bool
    trees,  # DraftTrees
    draft_tokens,  # [n, N] int64
    draft_stride,
    num_depths,  # K
    num_nodes,  # N
    P: tl.constexpr,
    C: tl.constexpr,
    NAMES_ROWS: tl.constexpr,  # else the only one
    BLOCK_K: tl.constexpr,
    FRONTIER: tl.constexpr,
):
    req = tl.program_id(0)
    state = tl.load(idx_mapping + req)
    if state < 0:
        return
    log_probs, tokens = candidates.log_probs, candidates.tokens
    at, draft = state * trees.max_num_nodes, draft_tokens + req * draft_stride
    row = req * table_stride  # of depth 1

    # Position i is that of depth i + 1.
    i = tl.arange(0, BLOCK_K)
    is_drafted = i < num_depths
    is_drafted &= tl.load(sample_requests + row + i, mask=i < num_depths, other=-1) >= 0
    depths = tl.sum(is_drafted.to(tl.int32), 0)
    needs_chain = (tl.load(chain_only + req) != 0) | (depths < num_depths)
    given = tl.where(needs_chain, num_depths, 0)  # nodes of the chain

    # The frontier. Lane j holds the first child of node j (lane 0: of row 0), and once
    # that is taken its next sibling. Given nodes are taken: lanes hold their siblings.
    lane = tl.arange(0, FRONTIER)
    row_after = tl.zeros([FRONTIER], tl.int32)  # of the candidates after node j
    chain_row = 0
    for depth in range(given):
        place = ((row + depth) * P + chain_row) * C
        token = tl.load(tokens + place)
        _store_node(
            trees, draft, at, depth + 1, needs_chain, depth, depth + 1, 0, token
        )
        if P > 1:
            chain_row = tl.maximum(tl.load(candidates.next_rows + place), 0)
            row_after = tl.where(lane == depth + 1, chain_row, row_after)

    is_taken = lane < given
    first_rank = is_taken.to(tl.int32)
    exists = (lane < depths) & (lane <= given) & (first_rank < C)
    # Log-probability of the path to the parent, and of the whole path.
    best = ((row + lane) * P + row_after) * C
    above = tl.load(log_probs + best, mask=lane < tl.minimum(depths, given), other=0.0)
    above = tl.cumsum(above, 0) - above
    own = tl.load(log_probs + best + first_rank, mask=exists, other=0.0)
    score = tl.where(exists, above + own, float("-inf"))
    # Parent, depth and rank of each in one number, so that one sum reads the best lane.
    what = lane * 65536 + (lane + 1) * 256 + first_rank

    for node in range(given + 1, num_nodes + 1):
        taken, hit = tl.max(score, 0), lane == tl.argmax(score, 0)
        is_real = taken > float("-inf")
        kind = tl.sum(tl.where(hit, what, 0), 0)
        before = tl.sum(tl.where(hit, above, 0.0), 0)
        parent, depth, rank = kind // 65536, kind // 256 % 256, kind % 256
        of_parent = tl.sum(tl.where(hit, row_after, 0), 0) if P > 1 else 0
        place = ((row + depth - 1) * P + of_parent) * C + rank
        token = tl.load(tokens + place, mask=is_real, other=0)
        _store_node(trees, draft, at, node, is_real, parent, depth, rank, token)

        more = is_real & (rank + 1 < C)
        sibling = tl.load(log_probs + place + 1, mask=more, other=float("-inf"))
        score = tl.where(hit, before + sibling, score)
        what = tl.where(hit, kind + 1, what)
        deeper, after = is_real & (depth < depths), 0
        if NAMES_ROWS:
            after = tl.load(candidates.next_rows + place, mask=deeper, other=-1)
            deeper &= after >= 0
        child = ((row + depth) * P + after) * C
        child = tl.load(log_probs + child, mask=deeper, other=float("-inf"))
        free = lane == node
        score = tl.where(free, taken + child, score)
        above = tl.where(free, taken, above)
        what = tl.where(free, node * 65536 + (depth + 1) * 256, what)
        if P > 1:
            row_after = tl.where(free, after, row_after)


def grow_trees(
    candidates: Candidates,
    sample_requests: torch.Tensor,
    idx_mapping: torch.Tensor,
    chain_only: torch.Tensor,
    trees: DraftTrees,
    draft_tokens: torch.Tensor,
    num_nodes: int,
) -> None:
    """Builds the tree of each request, and writes its tokens.

    Args:
        candidates: requests may be further apart than K positions, equally in all of
            these and in `sample_requests`.
        sample_requests: [n, K] int64, -1 where a position must not be drafted; these
            are the last positions of a request.
        idx_mapping: [n] int64, request state; -1 for padding, which is left alone.
        chain_only: [at least n] bool, requests whose nodes 1 to K must be a chain.
        trees: written, by request state.
        draft_tokens: [n, at least N] int64, written: the nodes' tokens; 0 for a node
            that does not exist because there are not as many paths.
        num_nodes: nodes of a tree (N), from K to `trees.max_num_nodes`.
    """
    num_reqs, depth, num_rows, count = candidates.tokens.shape
    stride, names_rows = sample_requests.stride(0), candidates.next_rows is not None
    for table in candidates[: 2 + names_rows]:
        assert table[0].is_contiguous() and table.shape == candidates.tokens.shape
        assert table.stride(0) == stride * num_rows * count
    assert names_rows or num_rows == 1
    assert len(idx_mapping) == num_reqs and depth <= trees.max_depth
    assert depth <= num_nodes <= trees.max_num_nodes
    _grow_kernel[(num_reqs,)](
        candidates,
        sample_requests,
        stride,
        idx_mapping,
        chain_only,
        trees,
        draft_tokens,
        draft_tokens.stride(0),
        depth,
        num_nodes,
        P=num_rows,
        C=count,
        NAMES_ROWS=names_rows,
        BLOCK_K=triton.next_power_of_2(trees.max_depth),
        FRONTIER=triton.next_power_of_2(trees.max_num_nodes),
        num_warps=1,
    )


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
        tree = TreeAttention(self.rows, n, n * b, True, b, b, before)
        for metadata in attn_metadata.values():
            metadata.draft_tree = tree
