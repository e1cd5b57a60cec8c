# SPDX-License-Identifier: Apache-2.0
"""Which nodes of a request's draft tree were accepted, as the scheduler hears of it."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class AcceptedNodes(NamedTuple):
    """The accepted path of one tree, from depth 1 on.

    Attributes:
        numbers: of its nodes, ascending. Nodes 1 to K are the chain of best tokens, and
            the first N nodes of a larger tree are the tree of N nodes: so of a plan of
            any size those count whose number is not above it.
        ranks: how many places each node's token is behind the best one of its depth.
        max_depth: K.
    """

    numbers: list[int]
    ranks: list[int]
    max_depth: int

    @classmethod
    def of(
        cls, output: "ModelRunnerOutput", req_index: int, num_accepted: int
    ) -> "AcceptedNodes | None":
        """Those of a request; None in a step that verified chains."""
        if (nodes := output.accepted_nodes) is None:
            return None
        numbers, ranks = nodes[:, req_index, 1 : num_accepted + 1].tolist()
        return cls(numbers, ranks, nodes.shape[2] - 1)
