# SPDX-License-Identifier: Apache-2.0
"""Verification of steps whose drafts are trees: finds the accepted path of each.

The target's own token is sampled at every row: the most likely one, or the one given by
the request's seed and the row's position (see `verification.py`). The walk starts at
the last token and goes to the child that holds the token sampled at the current row,
until there is none; the token sampled there is the bonus token. So the output is, token
for token, what the target samples without drafts, whatever the tree: it is built before
anything is sampled. The walk continues at a node with the total probability of its
children under the target (SpecInfer, arXiv 2305.09781, calls this naive sampling).
"""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.triton_utils import tl, triton
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.verification import draw_alone

from .trees import DraftTrees

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

    from .step import TreeStep


class TreeRejectionSampler(RejectionSampler):
    """Samples the target's token at every row and walks the tree; see `verify.py`.

    Chains are verified by the same walk.

    Args:
        step: has the trees of a step, and its rows.

    Attributes:
        walked: [2, n, K + 1] int32 of the latest step, from row 0 on: the row of each
            accepted node, and the rank of its token. Row 0 has no rank: its entry is
            whether the request could only use a chain.
    """

    def __init__(
        self, sampler: Sampler, spec_config: "SpeculativeConfig", step: "TreeStep"
    ):
        super().__init__(sampler, spec_config, step.rows.masks.device)
        self.step = step
        self._chunks: list[torch.Tensor] = []

    @property
    def walked(self) -> torch.Tensor:
        return self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks, 1)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        self._chunks = []
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        if self.step.has_trees:
            output.accepted_nodes = self.walked
        return output

    def draft_depths(self, input_batch: InputBatch) -> torch.Tensor:
        """[rows] int32, a row's position minus that of its request's first row."""
        if not self.step.has_trees:
            return input_batch.expanded_local_pos
        return self.step.rows.depths[input_batch.logits_indices]

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        requests = (idx_mapping, idx_mapping_np)
        rows = (pos, draft_sampled, expanded_local_pos)
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, *requests, *rows, seq_lens_upper_bound_np
        )
        of_row = pos, expanded_idx_mapping, expanded_local_pos
        drawn = self._draw(processed, verify_draft_sampled, *of_row, idx_mapping_np)
        first, n = sum(chunk.shape[1] for chunk in self._chunks), len(idx_mapping)
        chain_only = self.step.rows.chain_only[first : first + n]
        batch = verify_draft_sampled, cu_num_logits, idx_mapping, chain_only
        columns = self.num_speculative_steps + 1
        sampled, num_sampled, walked = walk_trees(
            self.step.trees, drawn, *batch, columns, self.step.has_trees
        )
        if self.step.any_chain_only:
            walked[1, :, 0] = chain_only
        self._chunks.append(walked)
        return processed, sampled, num_sampled

    def _draw(
        self,
        logits: torch.Tensor,
        nodes: torch.Tensor,
        pos: torch.Tensor,
        states: torch.Tensor,
        local_pos: torch.Tensor,
        states_np: np.ndarray,
    ) -> torch.Tensor:
        """[rows] int64, the target's own token after each row, whatever the tree is.

        Args:
            nodes, local_pos: unused; benchmarks with synthetic acceptance need them.
        """
        return draw_alone(self.sampler, logits, states, states_np, pos)

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
        *others: torch.Tensor,
    ) -> LogprobsTensors | None:
        """Takes the logprobs of a request's tokens from the rows of its path."""
        if max_num_logprobs != NO_LOGPROBS:
            logits = self._along_paths(logits, cu_num_logits)
        rows = cu_num_logits, cu_num_logits_np, max_num_logprobs, *others
        return super()._get_logprobs_tensors(sampled, num_sampled, logits, *rows)

    def _along_paths(
        self, logits: torch.Tensor, cu_num_logits: torch.Tensor
    ) -> torch.Tensor:
        """Logits with the rows of each path moved to the front of their request."""
        path = self._chunks[-1][0]
        first, end = cu_num_logits[:-1, None], cu_num_logits[1:, None]
        column = torch.arange(path.shape[1], device=path.device)
        rows = torch.arange(len(logits) + 1, device=path.device)
        to = torch.where(first + column < end, first + column, len(logits))
        rows[to.long()] = torch.minimum(first + path, end - 1).long()
        return logits[rows[:-1]]


# Packs a node's row and the rank of its token into one number.
RANKS = tl.constexpr(256)


# Chunks of requests begin anywhere in these tensors, and ranks anywhere behind paths.
_UNALIGNED = "nodes cu_num_logits idx_mapping chain_only path_ranks"


@triton.jit(
    do_not_specialize=["has_trees"], do_not_specialize_on_alignment=_UNALIGNED.split()
)
def _walk_kernel(
    drawn,  # [rows] int64
    nodes,  # [rows] token of each row; negative is never accepted
    cu_num_logits,  # [n + 1] int32
    idx_mapping,  # [n] int64
    chain_only,  # [n] bool
    trees,  # DraftTrees
    sampled,  # [n, >= K + 1] int64
    sampled_stride,
    num_sampled,  # [n] int32
    path,  # [n, K + 1] int32
    path_ranks,  # [n, K + 1] int32
    has_trees,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    begin = tl.load(cu_num_logits + req)
    rows = tl.load(cu_num_logits + req + 1) - begin
    row = tl.arange(0, BLOCK)
    is_node = (row > 0) & (row < rows)
    of_row = tl.load(idx_mapping + req) * trees.max_num_nodes + row - 1
    of_tree = is_node & has_trees
    parent = tl.load(trees.parents + of_row, mask=of_tree, other=row - 1)
    rank = tl.load(trees.ranks + of_row, mask=of_tree, other=0)
    # Consecutive rows of best tokens are a chain of the batch.
    is_chain = (parent == row - 1) & (rank == 0)
    is_node &= is_chain | (tl.load(chain_only + req) == 0)
    place = row * RANKS + rank
    node = tl.load(nodes + begin + row, mask=is_node, other=-1).to(tl.int64)

    at, at_rank, goes_on, count = 0, 0, rows > 0, 0
    for depth in range(DEPTH + 1):
        token = tl.load(drawn + begin + at, mask=goes_on, other=0)
        tl.store(sampled + req * sampled_stride + depth, token, mask=goes_on)
        tl.store(path + req * (DEPTH + 1) + depth, at, mask=goes_on)
        tl.store(path_ranks + req * (DEPTH + 1) + depth, at_rank, mask=goes_on)
        count += goes_on.to(tl.int32)
        is_next = is_node & (parent == at) & (node == token) & goes_on
        found = tl.max(tl.where(is_next, place, 0), 0)
        goes_on = found > 0
        at, at_rank = found // RANKS, found % RANKS
    tl.store(num_sampled + req, count)


def walk_trees(
    trees: DraftTrees,
    drawn: torch.Tensor,
    nodes: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    chain_only: torch.Tensor,
    num_columns: int,
    has_trees: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follows the target's tokens through each request's tree.

    Args:
        drawn: [rows] int64, the target's token after each row.
        nodes: [rows], the token that each row holds; negative is never accepted.
        cu_num_logits: [n + 1] int32, a request's rows: row 0 and its nodes.
        idx_mapping: [n] int64, request state.
        chain_only: [n] bool, whether only the chain of best tokens may be accepted.
        num_columns: of the sampled tokens, at least K + 1.
        has_trees: whether the rows are those of trees; else of chains.

    Returns:
        [n, num_columns] int64, the sampled tokens; [n] int32, how many they are:
        accepted nodes and the bonus token; [2, n, K + 1] int32, see
        `TreeRejectionSampler.walked`. What is past the last token is 0.
    """
    n = len(idx_mapping)
    # Zeros: columns without a token are not read, but copied to the host.
    sampled = drawn.new_zeros(n, num_columns)
    walked = cu_num_logits.new_zeros(2, n, trees.max_depth + 1)
    num_sampled = walked.new_empty(n)
    _walk_kernel[(n,)](
        drawn,
        nodes,
        cu_num_logits,
        idx_mapping,
        chain_only,
        trees,
        sampled,
        sampled.stride(0),
        num_sampled,
        *walked,
        has_trees,
        DEPTH=trees.max_depth,
        BLOCK=triton.next_power_of_2(trees.max_num_nodes + 1),
        num_warps=1,
    )
    return sampled, num_sampled, walked
