# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a request's draft tree were accepted, as the scheduler hears of it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class AcceptedNodes(NamedTuple):
    """The accepted path of one tree, from depth 1 on.

    Attributes:
        numbers: of its nodes, ascending. The first N nodes of a larger tree are the
            tree of N nodes: so of a tree of any size those count whose number is not
            above it.
        ranks: how many places each node's token is behind the best one of its depth.
        max_depth: K.
        is_chain: whether the chain of best tokens was verified in the tree's place.
    """

    numbers: list[int]
    ranks: list[int]
    max_depth: int
    is_chain: bool = False

    @property
    def num_best(self) -> int:
        """Nodes that the chain of best tokens has in common with the path.

        Where that chain ends within the tree for want of nodes, it might have gone on,
        which is so in one step of twenty with 15 nodes, and in one of sixty with 31:
        what chains accept is told too low by less than a hundredth.
        """
        return next((i for i, rank in enumerate(self.ranks) if rank), len(self.ranks))

    @classmethod
    def of(
        cls, output: "ModelRunnerOutput", req_index: int, num_accepted: int
    ) -> "AcceptedNodes | None":
        """Those of a request; None in a step that verified chains."""
        if (nodes := output.accepted_nodes) is None:
            return None
        numbers, ranks = nodes[:, req_index, 1 : num_accepted + 1].tolist()
        return cls(numbers, ranks, nodes.shape[2] - 1, bool(nodes[1, req_index, 0]))
