# SPDX-License-Identifier: Apache-2.0
"""The draft trees of a step, between the model runner and the drafter; and whether an
engine can verify them. If it cannot, chains are drafted."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter import first_of
from vllm.config.drafter.length import why_no_trees_beside
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.spec_decode.draft_trees import use_chains
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler

from ..inputs import TargetStep
from .accept import PathMover, accepted_rows, dummy_rows
from .attend import why_layer_cannot
from .grow import Candidates, grow_trees
from .trees import DraftTrees, TreeAttention, TreeRows, lay_out_rows
from .verify import TreeRejectionSampler

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


# vLLM's own logits processors: what they depend on is known.
KNOWN_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)
# If a request has more rows than this, the backend's own attention serves all requests
# without trees. Otherwise tree attention serves them too, which saves one call per
# layer in a step that has no CUDA graph and is bound by the host.
LONG_PROMPT = 512


def depends_on_tokens(sampler: Sampler, states: np.ndarray) -> np.ndarray:
    """[n] bool, whether processing a request's logits depends on preceding tokens.

    Args:
        states: [n], request states.
    """
    if any(type(p) not in KNOWN_PROCESSORS for p in sampler.logits_processors):
        return np.ones(len(states), dtype=bool)  # a custom processor
    found = sampler.penalties_state.use_penalty[states].copy()
    (bad_words,) = (p for p in sampler.logits_processors if type(p) is BadWordsState)
    found |= bad_words.num_bad_words.np[states] > 0
    if sampler.thinking_budget_state.enabled:
        found |= sampler.thinking_budget_state.use_thinking_budget[states]
    return found


def make_tree_step(
    vllm_config: VllmConfig, depth: int, device: torch.device
) -> "TreeStep | None":
    """The `TreeStep` of an engine that drafts trees; None for others.

    Args:
        depth: of the trees (K).
    """
    num_nodes = vllm_config.speculative_config.drafter.num_nodes
    if num_nodes is None:
        return None
    scheduler = vllm_config.scheduler_config
    trees = DraftTrees.chains(scheduler.max_num_seqs, depth, num_nodes, device)
    return TreeStep(trees, scheduler.max_num_batched_tokens)


class TreeStep:
    """Positions, attention, verification and accepted rows of a step's draft trees.

    A step calls, in this order, `lay_out`, `attach`, `constrain`, `accept`, and `grow`
    for the next step. A step in which no request has more drafts than a chain is not
    treated as one with trees.

    Args:
        trees: the drafted trees.
        max_num_tokens: the most rows of a step.

    Attributes:
        has_trees: whether the step has trees, not only chains.
        any_chain_only: whether some request drafts a chain, and can accept only that.
    """

    def __init__(self, trees: DraftTrees, max_num_tokens: int):
        device, self.trees = trees.parents.device, trees
        self.rows = TreeRows(len(trees.parents), max_num_tokens, device)
        self.has_trees = self.has_rope = self.any_chain_only = False
        self.sampler: TreeRejectionSampler | None = None
        self.long_prompt = LONG_PROMPT
        self._move: PathMover | None = None
        # [rows of the step] int64, by how much `lay_out` changed each row's position.
        self._moved_by: torch.Tensor | None = None

    def bind(self, runner: "GPUModelRunner", layers: dict[str, Any]) -> None:
        """Attaches to a runner, and replaces its rejection sampler.

        Args:
            layers: the target's attention layers, by name.
        """
        self.layers = layers
        self.groups = {
            name: number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if name in layers
        }
        runner.model_state.draft_tree = self
        if runner.model_config.is_mm_prefix_lm:
            # Tokens of an image attend to later ones, too.
            self.long_prompt = 0
        self.has_rope = runner.model_state.rope_state is not None
        runner.rejection_sampler = self.sampler = TreeRejectionSampler(
            runner.sampler, runner.speculative_config, self
        )
        self._move = None  # KV caches are allocated after this

    # Before the target runs.

    def lay_out(self, batch: InputBatch) -> None:
        """Writes the positions of the rows of this step's trees.

        To be called after KV slots were computed, from positions by row number.
        """
        drafts = batch.num_draft_tokens_per_req
        depth = self.trees.max_depth
        self.has_trees = drafts is not None and int(drafts.max()) > depth
        if not self.has_trees:
            return
        by_number = batch.positions.clone() if self.has_rope else None
        lay_out_rows(self.trees, self.rows, batch)
        if self.has_rope:
            self._moved_by = batch.positions - by_number

    def _verifies_trees(self, batch: InputBatch) -> bool:
        """A dummy batch has no trees, whatever the previous step had."""
        return self.has_trees and batch.num_draft_tokens_per_req is not None

    def move_rope(self, positions: torch.Tensor, batch: InputBatch) -> None:
        """Changes M-RoPE positions of tree rows by as much as their plain ones.

        Args:
            positions: [D, at least rows] int64, by row number; in place.
        """
        if self._verifies_trees(batch):
            positions[:, : len(self._moved_by)] += self._moved_by

    def attach(
        self, attn_metadata: dict[str, Any], batch: InputBatch, for_capture: bool
    ) -> None:
        """Makes the target's layers use tree attention, if the step has trees."""
        if for_capture:
            tree = self._to_record(batch)
        else:
            tree = self._of_step(batch) if self._verifies_trees(batch) else None
        for name in self.layers if tree else ():
            attn_metadata[name].draft_tree = tree

    def _to_record(self, batch: InputBatch) -> TreeAttention | None:
        """Graphs of queries longer than a chain's are captured with tree attention."""
        longest = batch.max_query_len or int(batch.num_scheduled_tokens.max())
        if longest <= self.trees.max_depth + 1:
            return None
        self.rows.prefix_lens.zero_()
        n, num_tokens = batch.num_reqs_after_padding, batch.num_tokens_after_padding
        return TreeAttention(self.rows, n, num_tokens, True, longest, longest)

    def _of_step(self, batch: InputBatch) -> TreeAttention:
        n = batch.num_reqs
        if int(batch.num_scheduled_tokens.max()) > self.long_prompt:
            n = int(np.count_nonzero(batch.num_draft_tokens_per_req))
        num_tokens = int(batch.query_start_loc_np[n])
        longest = int(batch.num_scheduled_tokens[:n].max())
        of_tree = int(batch.num_draft_tokens_per_req.max()) + 1
        covers = n == batch.num_reqs
        return TreeAttention(self.rows, n, num_tokens, covers, longest, of_tree)

    # Verification, and after it.

    def constrain(
        self, batch: InputBatch, grammar_output: "GrammarOutput | None"
    ) -> None:
        """Finds requests whose logits processing depends on preceding tokens.

        They draft and verify a chain inside their tree: there row i is preceded by rows
        1 to i - 1, as vLLM's logits processors assume.
        """
        chain_only = depends_on_tokens(self.sampler.sampler, batch.idx_mapping_np)
        if grammar_output is not None:
            ids = set(grammar_output.structured_output_request_ids)
            chain_only |= np.array([req_id in ids for req_id in batch.req_ids])
        needed = bool(chain_only.any())
        if needed:
            async_tensor_h2d(chain_only, out=self.rows.chain_only[: len(chain_only)])
        elif self.any_chain_only:
            self.rows.chain_only.zero_()
        self.any_chain_only = needed

    def accept(self, step: TargetStep) -> TargetStep:
        """Moves the KV of accepted paths; returns the step with their rows only."""
        batch, depth = step.batch, self.trees.max_depth
        if step.is_dummy:
            return dummy_rows(step, depth)
        if not self.has_trees:
            return step
        logits = batch.cu_num_logits[1:] - batch.cu_num_logits[:-1]
        first_rows = batch.query_start_loc[1 : batch.num_reqs + 1] - logits
        if self._move is None:
            self._move = self._mover()
        path = self.sampler.walked[0]
        self._move(step.slot_mappings, path, step.num_sampled, first_rows)
        return accepted_rows(step, depth, path)

    def grow(
        self,
        candidates: Candidates,
        sample_requests: torch.Tensor,
        idx_mapping: torch.Tensor,
        drafts: torch.Tensor,
        num_nodes: int,
    ) -> None:
        """Builds the next step's trees, and writes their tokens; see `grow_trees`."""
        requests = sample_requests, idx_mapping, self.rows.chain_only
        grow_trees(candidates, *requests, self.trees, drafts, num_nodes)

    def _mover(self) -> PathMover:
        if self.trees.parents.is_cpu:
            from .cpu import CPUPathMover

            return CPUPathMover(self.layers, self.groups)
        caches = {name: layer.kv_cache for name, layer in self.layers.items()}
        return PathMover(caches, self.groups)


logger = init_logger(__name__)


def tree_step(runner: "GPUModelRunner") -> TreeStep | None:
    """The `TreeStep` of a runner, once its attention backends are known.

    Returns:
        None if no trees are drafted, or the target cannot verify them: then chains are
        drafted instead, and one log line says why.
    """
    step: TreeStep | None = getattr(runner.speculator, "tree_step", None)
    if step is None:
        return None
    layers = target_layers(runner)
    reason = why_no_trees(runner, layers)
    if reason is None:
        step.bind(runner, layers)
        return step
    use_chains(runner.vllm_config)
    runner.speculator.draft_chains()
    logger.warning(
        "Draft trees are not used: they cannot be verified with %s. Chains of %d "
        "tokens at most are drafted instead. Without that, trees are used.",
        reason,
        step.trees.max_depth,
    )
    return None


def target_layers(runner: "GPUModelRunner") -> dict[str, Any]:
    """The target's layers that keep KV or state, by name."""
    layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)
    drafts = runner.speculator.draft_attn_layer_names
    return {name: layer for name, layer in layers.items() if name not in drafts}


def why_no_trees(runner: "GPUModelRunner", layers: dict[str, Any]) -> str | None:
    """Why trees cannot be verified; None if they can."""
    # Imported here: it holds a `TreeStep`.
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    config: VllmConfig = runner.vllm_config
    if (found := why_no_trees_beside(config)) is not None:
        return found
    mixed = config.compilation_config.cudagraph_mode.mixed_mode()
    reasons = {
        "FULL CUDA graphs of mixed batches": mixed == CUDAGraphMode.FULL,
        # Layers that share KV get the rows that are sampled from alone.
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        f"{type(runner.model_state).__name__}": type(runner.model_state)
        is not DefaultModelState,
    }
    if (found := first_of(reasons)) is not None:
        return found
    return next(filter(None, map(why_layer_cannot, layers.values())), None)
