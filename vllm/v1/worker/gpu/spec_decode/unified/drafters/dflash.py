# SPDX-License-Identifier: Apache-2.0
"""Draft trees of the DFlash family: DFlash, JetSpec, DFlash2, LiLiCorr, DSpark.

vLLM's speculators run the pass: context K/V of the verified rows, then a block of
queries. They are driven here with steps that have the rows of accepted paths only.
For trees sampling is replaced: the block's candidates are kept, and trees are grown
from them. Chains are sampled as vLLM does, in a block that is no longer than they need:
at many requests the rows of a block cost time.

A block's positions are independent (DFlash, arXiv 2602.06036), or a small head scores
each candidate after each one of the position before (DFlash2, LiLiCorr, DSpark): a
lattice of C x C edges a depth, without another pass of the draft model.
"""

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import num_candidates
from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.argmax import best_candidates
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import (
    CandidateSampler,
    DFlash2Speculator,
)
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from ..config import draft_lengths
from ..inputs import TargetStep
from ..tree.grow import Candidates
from ..tree.step import TreeStep, make_tree_step

# Positions of the shortest block: rows of a shorter one cost as much.
SHORTEST_BLOCK = 2
WHOLE = 0  # in place of the length of a block: the whole one


def of_edges(tokens: torch.Tensor, edges: torch.Tensor) -> Candidates:
    """The candidates of a lattice.

    Args:
        tokens: [n, K, C], candidates.
        edges: [n, K, C, C], score of each (last) after each of the position before, up
            to a constant of each row. At the first position all C rows are equal.
    """
    # Ties go to the first candidate, as in the chain.
    edges, order = edges.float().sort(dim=-1, descending=True, stable=True)
    tokens = tokens[:, :, None].expand(order.shape).gather(-1, order)
    # The number of each candidate is the row of those after it.
    return Candidates(edges.log_softmax(-1), tokens, order)


class TreeDFlash(DFlashSpeculator):
    """DFlash with trees: the positions of its block are independent.

    Attributes:
        tree_step: the trees to verify; None if the target cannot: then chains are
            drafted.
        block: length of the block that is run, shorter for chains, or `WHOLE`.
        candidates: of the block, [R, K, 1 or C, C]. A CUDA graph of any batch writes
            them, and trees of all sizes are grown from them after it.
        drafts: [R, N] int64, the nodes of each request's tree, or its chain.
    """

    is_conditional = False
    block = WHOLE
    tree_step: TreeStep | None

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(with_whole_block(vllm_config), device)
        depth, n = self.num_speculative_steps, self.max_num_reqs
        lengths = block_lengths(depth, draft_lengths(vllm_config))
        # By length of a block, the attributes that depend on it.
        self._of_block = {k: self._sized(k or depth) for k in (WHOLE, *lengths)}
        verified = vllm_config.speculative_config.drafter.num_verified
        self.tree_step = make_tree_step(vllm_config, depth, device)
        self.drafts = torch.zeros(n, verified, dtype=torch.int64, device=device)
        # Of the rows of accepted paths; CUDA graphs read it.
        self._start_loc = torch.zeros(n + 1, dtype=torch.int32, device=device)
        count, is_conditional = self._count_candidates(verified), self.is_conditional
        shape = n, depth, count if is_conditional else 1, count
        self.candidates = Candidates.zeros(shape, is_conditional, device)

    def draft_chains(self) -> None:
        """Drafts chains instead of trees; the schedule has been changed to them."""
        self.tree_step = None

    @property
    def _is_chain(self) -> bool:
        return self.block != WHOLE or self.tree_step is None

    def _sized(self, length: int) -> dict[str, Any]:
        """Attributes of vLLM's speculator that depend on the length of the block."""
        n = self.max_num_reqs
        extra = self.num_query_per_req - self.num_speculative_steps
        columns = torch.arange(length, dtype=torch.int32, device=self.device)
        return {
            "num_speculative_steps": length,
            "num_query_per_req": length + extra,
            "draft_tokens": self.draft_tokens.new_zeros(n, length),
            "sample_col": columns.repeat(n),
        }

    def _use_block(self, length: int) -> None:
        """Has vLLM's speculator run blocks of this length."""
        self.block = length
        self.query_cudagraph_manager = getattr(self, _graphs_of(length), None)
        vars(self).update(self._of_block[length])

    def _each_block(self) -> Iterator[int]:
        """Uses each length in turn, the whole block first and at the end."""
        for length in self._of_block:
            self._use_block(length)
            yield length
        self._use_block(WHOLE)

    def _count_candidates(self, num_nodes: int) -> int:
        """Candidates of each position (C)."""
        return min(num_candidates(num_nodes), self.vocab_size)

    def _ranked(self, rows: torch.Tensor) -> Candidates:
        """Candidates of the block, with tokens of any integer dtype.

        Args:
            rows: [n, K, H], the draft model's output at the sampled queries.
        """
        n, depth, _ = rows.shape
        logits = self.compute_draft_logits(rows.flatten(0, 1), 0)
        found = best_candidates(logits, self.candidates.tokens.shape[3])
        return Candidates(*(table.view(n, depth, 1, -1) for table in found))

    def _generate_draft(
        self, num_reqs: int, num_tokens_padded: int, *args: Any, **kwargs: Any
    ) -> None:
        if self._is_chain:
            super()._generate_draft(num_reqs, num_tokens_padded, *args, **kwargs)
            return
        hidden = self._run_model(num_tokens_padded, *args, **kwargs)
        rows = hidden[self.sample_indices[: num_reqs * self.num_speculative_steps]]
        found = self._ranked(rows.view(num_reqs, -1, rows.shape[-1]))
        for kept, table in zip(self.candidates, found, strict=True):
            if kept is not None:
                kept[:num_reqs].copy_(table)

    def set_attn(self, *args: Any) -> None:
        *known, buffers, groups = args
        # A graph would read the target's batch, which has the rows of whole trees.
        buffers = copy(buffers)
        buffers.query_start_loc = self._start_loc
        super().set_attn(*known, buffers, groups)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        for length in self._each_block():
            super().init_cudagraph_manager(cudagraph_mode)
            # An attribute for each length, as vLLM finds graphs of a profiling run.
            setattr(self, _graphs_of(length), self.query_cudagraph_manager)

    def capture(self) -> None:
        for _ in self._each_block():
            super().capture()

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *states: torch.Tensor,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Drafts for every request of a verified batch; see BaseSpeculator.

        Returns:
            [num_reqs, N] int64 draft tokens; the first `num_speculative_tokens` are
            valid.
        """
        has_kv = not skip_attn_for_dummy_run
        step = TargetStep(
            input_batch,
            num_sampled,
            num_rejected,
            self.block_tables.slot_mappings if has_kv else None,
            last_hidden_states,
            aux_hidden_states,
            dummy_run,
        )
        if self.tree_step is not None and has_kv:
            step = self.tree_step.accept(step)
        n, batch = input_batch.num_reqs, step.batch
        self._start_loc[: n + 1].copy_(batch.query_start_loc[: n + 1])
        rest = (
            batch,
            attn_metadata,
            slot_mappings,
            step.last_hidden,
            step.aux_hidden,
            num_sampled,
            step.num_rejected,
            *states,
        )
        others |= {
            "dummy_run": dummy_run,
            "skip_attn_for_dummy_run": skip_attn_for_dummy_run,
            "num_speculative_tokens": num_speculative_tokens,
        }
        drafts, count = self.drafts[:n], num_speculative_tokens
        if count is None:
            count = drafts.shape[1]
        block = next((k for k in self._of_block if 0 < count <= k), WHOLE)
        self._use_block(block)
        try:
            is_chain, chains = self._is_chain, super().propose(*rest, **others)
        finally:
            self._use_block(WHOLE)
        if is_chain:
            # An idle data-parallel rank drafts for fewer requests than its batch has.
            drafts[: len(chains), : chains.shape[1]] = chains
        elif count and not dummy_run:
            self._grow(count, batch.idx_mapping)
        return drafts

    def _grow(self, num_drafts: int, idx_mapping: torch.Tensor) -> None:
        n, depth = len(idx_mapping), self.num_speculative_steps
        requests = self.sample_idx_mapping[: n * depth]
        fits = self.sample_pos[: n * depth] < self.max_model_len
        requests = torch.where(fits, requests, -1).view(n, depth)
        candidates, drafts = self.candidates.of_first(n, depth), self.drafts[:n]
        self.tree_step.grow(candidates, requests, idx_mapping, drafts, num_drafts)


class TreeDFlash2(TreeDFlash, DFlash2Speculator):
    """DFlash2: its selector scores pairs of candidates."""

    is_conditional = True
    scorer = "candidate_selector"

    def _sized(self, length: int) -> dict[str, Any]:
        sampler = CandidateSampler(self.max_num_reqs, length, self.top_k, self.device)
        return super()._sized(length) | {"candidate_sampler": sampler}

    def load_draft_model(self, *args: Any) -> nn.Module:
        model = super().load_draft_model(*args)
        self._convs = [m for m in model.modules() if isinstance(m, DFlashGroupedConv)]
        compiled = [getattr(model.model, self.scorer)]
        if self._convs and self.device.type != "cuda":
            compiled.append(model.model)
        # Those that vLLM does compile; the beam's scorer never is.
        self._of_whole = [m for m in compiled if not getattr(m, "do_not_compile", True)]
        return model

    def _use_block(self, length: int) -> None:
        """A row's place in its block is baked into what vLLM compiles, for the block
        that it meets first, a whole one: in shorter ones that runs uncompiled. On a GPU
        only the scorer does, as the kernel of convolutions is told their length."""
        super()._use_block(length)
        whole = self._of_block[WHOLE]["num_speculative_steps"]
        is_shorter = self.num_speculative_steps != whole
        rows = self.num_query_per_req
        DFlashGroupedConv.shorter_block = rows if is_shorter else None
        for conv in self._convs:
            conv.block_size = rows
        for module in self._of_whole:
            module.do_not_compile = is_shorter

    def _count_candidates(self, num_nodes: int) -> int:
        return self.top_k

    def _ranked(self, rows: torch.Tensor) -> Candidates:
        n, depth, _ = rows.shape
        tokens, logits = self.model.compute_candidates(rows.flatten(0, 1))
        tokens = tokens.view(n, depth, -1)
        edges = self._score_candidates(tokens, logits.view_as(tokens), rows)
        return of_edges(tokens, edges)


class TreeLiLiCorr(TreeDFlash2, LiLiCorrSpeculator):
    """LiLiCorr: as DFlash2, with another head."""

    scorer = "lilicorr"


class TreeDSpark(TreeDFlash, DSparkSpeculator):
    """DSpark: the token before adds a bias to the logits of a position.

    The candidates of a position are the best tokens after the chain so far, as vLLM's
    speculator draws it.
    """

    is_conditional = True

    def _sized(self, length: int) -> dict[str, Any]:
        sized, anchors = super()._sized(length), torch.arange(self.max_num_reqs)
        anchors = anchors.to(self.device) * sized["num_query_per_req"]
        return sized | {"_anchor_idx": anchors}

    def _ranked(self, rows: torch.Tensor) -> Candidates:
        n, depth, _ = rows.shape
        logits = self.model.compute_draft_logits(rows.flatten(0, 1)).view(n, depth, -1)
        # [n, C], the tokens that a position is scored after.
        before = self.input_buffers.input_ids[self._anchor_idx[:n], None]
        before = before.expand(-1, self.candidates.tokens.shape[3])
        tokens, edges = [], []
        for i in range(depth):
            best = self.model.markov_bias(self.model.markov_embed(before[:, 0]))
            log_probs, ids = best_candidates(logits[:, i] + best, before.shape[1])
            found = self._edges(logits[:, i], before, ids.long())
            # As they were ranked: rounding must not change the chain.
            found[:, 0] = log_probs
            edges.append(found)
            before = self.model.map_draft_to_target(ids.long())
            tokens.append(before)
        return of_edges(torch.stack(tokens, 1), torch.stack(edges, 1))

    def _edges(
        self, logits: torch.Tensor, before: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """[n, C, C] scores of candidates `ids` after each token of `before`.

        Args:
            logits: [n, V], of the position alone.
            before: [n, C] int64, in the target's ids.
            ids: [n, C] int64, in the drafter's.
        """
        weight = self.model.model.markov_head.markov_w2.weight[ids]
        bias = self.model.markov_embed(before) @ weight.transpose(1, 2)
        scale = self.model.logits_processor.scale
        return logits.gather(1, ids)[:, None].float() + scale * bias.float()


def block_lengths(depth: int, lengths: list[int]) -> list[int]:
    """Lengths of blocks for chains of `lengths`, ascending: of these the nearest to the
    whole block (K) and its halves down to `SHORTEST_BLOCK`; each has CUDA graphs."""
    chains, blocks, half = [k for k in lengths if 0 < k <= depth], set(), depth
    while chains and half >= SHORTEST_BLOCK:
        blocks.add(min(chains, key=lambda k: (abs(k - half), -k)))
        half //= 2
    return sorted(blocks)


def _graphs_of(length: int) -> str:
    return f"graphs_of_{length}"


def with_whole_block(vllm_config: VllmConfig) -> VllmConfig:
    """A copy whose K is that of a whole block; not a tree's nodes."""
    config, spec = copy(vllm_config), copy(vllm_config.speculative_config)
    spec.num_speculative_tokens = spec.drafter.num_speculative_tokens
    config.speculative_config = spec
    return config


KINDS: dict[str, type[TreeDFlash]] = {  # by architecture
    "DFlash2DraftModel": TreeDFlash2,
    "DFlash2BeamDraftModel": TreeDFlash2,
    "LiLiCorrDraftModel": TreeLiLiCorr,
}


def build_tree_speculator(
    vllm_config: VllmConfig, device: torch.device
) -> DFlashSpeculator:
    """The speculator for a config whose drafter `is_block` and drafts trees."""
    spec = vllm_config.speculative_config
    found = (KINDS.get(name) for name in spec.draft_model_config.architectures)
    kind = (
        TreeDSpark if spec.method == "dspark" else next(filter(None, found), TreeDFlash)
    )
    return kind(vllm_config, device)
