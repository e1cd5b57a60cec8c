# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a request's draft tree were accepted, for the scheduler."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


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
