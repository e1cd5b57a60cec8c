# SPDX-License-Identifier: Apache-2.0
"""Whether an engine drafts trees, which depends on its workers' attention backends."""

from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.config.drafter.length import AutoSchedule, candidate_lengths, is_auto

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerBase


def use_chains(vllm_config: VllmConfig) -> None:
    """Has every step draft chains instead of trees."""
    spec = vllm_config.speculative_config
    depth = spec.drafter.num_speculative_tokens
    schedule = spec.num_speculative_tokens_per_batch_size
    if is_auto(spec):
        schedule = AutoSchedule(candidate_lengths(depth))
    else:
        most = vllm_config.scheduler_config.max_num_seqs
        ranges = schedule or [(1, most, depth)]
        schedule = [(first, last, min(k, depth)) for first, last, k in ranges]
    spec.num_speculative_tokens_per_batch_size = schedule


def agree_on_trees(executor: "Executor") -> None:
    """Has an engine draft chains if its workers cannot verify trees.

    To be called once the workers know their attention backends.
    """
    spec = executor.speculative_config
    if spec is None or spec.drafter is None or spec.drafter.num_nodes is None:
        return
    if not all(executor.collective_rpc(_verifies_trees)):
        use_chains(executor.vllm_config)


def _verifies_trees(worker: "WorkerBase") -> bool:
    return getattr(worker.model_runner, "draft_tree", None) is not None
