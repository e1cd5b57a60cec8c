# SPDX-License-Identifier: Apache-2.0
"""What the engine and its scheduler know of draft trees: whether its workers can verify
them, and which nodes were accepted."""

from typing import TYPE_CHECKING, NamedTuple

from vllm.config.drafter.length import AutoSchedule, candidate_lengths, is_auto

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.worker_base import WorkerBase


class AcceptedNodes(NamedTuple):
    """The accepted path of one tree, from depth 1 on.

    Attributes:
        numbers: of its nodes, ascending. The first N nodes of a larger tree are the
            tree of N nodes, which would have had those numbers up to N accepted.
        ranks: rank of each node's token at its depth, 0 for the best one.
        max_depth: K.
        is_chain: whether the chain of best tokens was verified instead of the tree.
    """

    numbers: list[int]
    ranks: list[int]
    max_depth: int
    is_chain: bool = False

    @property
    def num_best(self) -> int:
        """Nodes that the path has in common with the chain of best tokens.

        The tree may contain only the beginning of that chain, which might have been
        accepted further. This is so in one step of twenty with 15 nodes, and in one of
        sixty with 31; it makes the acceptance of chains too low by less than 1 %.
        """
        return next((i for i, rank in enumerate(self.ranks) if rank), len(self.ranks))

    @classmethod
    def of(
        cls, output: "ModelRunnerOutput", req_index: int, num_accepted: int
    ) -> "AcceptedNodes | None":
        """The accepted nodes of a request; None in a step that verified chains."""
        if (nodes := output.accepted_nodes) is None:
            return None
        numbers, ranks = nodes[:, req_index, 1 : num_accepted + 1].tolist()
        return cls(numbers, ranks, nodes.shape[2] - 1, bool(nodes[1, req_index, 0]))


def use_chains(vllm_config: "VllmConfig") -> None:
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
