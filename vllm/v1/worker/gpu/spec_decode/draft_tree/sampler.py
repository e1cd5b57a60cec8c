# SPDX-License-Identifier: Apache-2.0
"""Verification of steps whose drafts are trees."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from .trees import DraftTrees, TreeRows
from .verify import walk_trees

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class TreeRejectionSampler(RejectionSampler):
    """Samples the target's token at every row and walks the tree; see `verify.py`.

    Chains are verified by the same walk.

    Attributes:
        has_trees: whether the step has trees, not only chains.
        walked: [2, n, K + 1] int32 of the latest step, from row 0 on: the row of each
            accepted node, and the rank of its token. Row 0 has no rank: its entry is
            whether the request could only use a chain.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: "SpeculativeConfig",
        trees: DraftTrees,
        rows: TreeRows,
    ):
        device = trees.parents.device
        super().__init__(sampler, spec_config, device)
        self.trees, self.rows = trees, rows
        self.has_trees = False
        self._any_chain_only = False
        self._chunks: list[torch.Tensor] = []

    @property
    def walked(self) -> torch.Tensor:
        return self._chunks[0] if len(self._chunks) == 1 else torch.cat(self._chunks, 1)

    def set_chain_only(self, chain_only: np.ndarray) -> None:
        """Sets which requests of the batch draft a chain, and can accept only that.

        Args:
            chain_only: [n] bool, on the host.
        """
        needed = bool(chain_only.any())
        if needed:
            async_tensor_h2d(chain_only, out=self.rows.chain_only[: len(chain_only)])
        elif self._any_chain_only:
            self.rows.chain_only.zero_()
        self._any_chain_only = needed

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        self._chunks = []
        output = super().__call__(logits, input_batch, draft_logits, invalid_drafts)
        if self.has_trees:
            output.accepted_nodes = self.walked
        return output

    def draft_depths(self, input_batch: InputBatch) -> torch.Tensor:
        """[rows] int32, a row's position minus that of its request's first row."""
        if not self.has_trees:
            return input_batch.expanded_local_pos
        return self.rows.depths[input_batch.logits_indices]

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
        drawn = self._draw(
            processed,
            verify_draft_sampled,
            pos,
            expanded_idx_mapping,
            expanded_local_pos,
        )
        first, n = sum(chunk.shape[1] for chunk in self._chunks), len(idx_mapping)
        # Zeros: columns without a token are not read, but copied to the host.
        sampled = drawn.new_zeros(n, self.num_speculative_steps + 1)
        walked = expanded_local_pos.new_zeros(2, n, self.trees.max_depth + 1)
        num_sampled = walked.new_empty(n)
        walk_trees(
            self.trees,
            drawn,
            verify_draft_sampled,
            cu_num_logits,
            idx_mapping,
            self.rows.chain_only[first : first + n],
            sampled,
            num_sampled,
            *walked,
            self.has_trees,
        )
        if self._any_chain_only:
            walked[1, :, 0] = self.rows.chain_only[first : first + n]
        self._chunks.append(walked)
        return processed, sampled, num_sampled

    def _draw(
        self,
        logits: torch.Tensor,
        nodes: torch.Tensor,
        pos: torch.Tensor,
        states: torch.Tensor,
        local_pos: torch.Tensor,
    ) -> torch.Tensor:
        """The target's own token after each row, whatever the tree is.

        Args:
            logits: [rows, V], processed.
            nodes: [rows], the token that each row holds; unused, like `local_pos`:
                benchmarks with synthetic acceptance need them.
            pos: [rows] int64, position of each row.
            states: [rows], request state of each row.
            local_pos: [rows] int32, number of each row in its request.

        Returns:
            [rows] int64.
        """
        return gumbel_sample(
            logits,
            states,
            self.sampler.sampling_states.temperature.gpu,
            self.sampler.sampling_states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
        expanded_idx_mapping: torch.Tensor | None = None,
    ) -> LogprobsTensors | None:
        """Takes the logprobs of a request's tokens from the rows of its path."""
        if max_num_logprobs != NO_LOGPROBS:
            logits = self._along_paths(logits, cu_num_logits)
        return super()._get_logprobs_tensors(
            sampled,
            num_sampled,
            logits,
            cu_num_logits,
            cu_num_logits_np,
            max_num_logprobs,
            expanded_idx_mapping,
        )

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
