# SPDX-License-Identifier: Apache-2.0
"""How many nodes of a batch's trees are verified: the scheduler's side of it.

A tree's nodes are numbered from the likeliest path on, so that the first ones are a
tree, too. Of all nodes of a batch those of the likeliest paths are verified: of each
request the first few, of whom the device finds out how many.

Output is the target's own, for any tree that does not depend on what the target draws
at its rows (see `draft_tree/verify.py`). A tree of best candidates is a function of its
request's text so far. How much of it is verified goes by the probabilities of the
batch's paths, functions of texts that exist, and by a budget, which goes by those of
earlier trees and by what was accepted of them. Nothing of a tree is drawn by noise that
a later step draws by again, so that all of its chances may count, unlike a chain's.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.config.drafter.length import MAX_TREE_REQUESTS
from vllm.v1.spec_decode.dynamic.budgets import TreeBudgets
from vllm.v1.spec_decode.dynamic.node_chances import NodeChances
from vllm.v1.spec_decode.dynamic.step_times import Row

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.spec_decode.dynamic.draft_length import DraftLengths, Load


class TreePart(NamedTuple):
    """What was verified of one tree.

    Attributes:
        num_chain: nodes of it that hold the chain of best tokens.
        rest_of_chain: chances of the chain's next nodes, as far as the tree has them,
            each after those before it.
        unverified: [N], chances of the tree's nodes; 0 for those that were verified.
    """

    num_chain: int
    rest_of_chain: list[float]
    unverified: list[float]


class TreeTrimming:
    """Keeps what drafters said of their trees, and chooses budgets by it.

    Args:
        lengths: what chooses how much is drafted.
        times: see `TreeBudgets`.
        nodes: of the trees of which a part is verified (N).

    Attributes:
        parts: of the last output, by request of whose tree a part was verified.
    """

    def __init__(self, lengths: "DraftLengths", times: dict[int, Row], nodes: int):
        self.nodes = nodes
        self._depth = lengths.num_speculative_tokens
        sizes = lengths.times, times, self._depth
        self.budgets = TreeBudgets(*sizes, lengths.served)
        self.parts: dict[str, TreePart] = {}
        self._acceptance, self._chances = lengths.acceptance, NodeChances()
        # By request, of the last trees that were told of: [N] chances of nodes.
        self._known: dict[str, np.ndarray] = {}

    def forget_parts(self) -> None:
        """The next output is taken in."""
        self.parts = {}

    def take(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Takes in what workers tell of a step that verified trees."""
        drafts = step.scheduled_spec_decode_tokens
        own = [i for i, name in enumerate(output.req_ids) if name in drafts]
        told, parts = output.verified_drafts[own], [-self._depth - 1, -1]
        paths, chains, verified = np.split(told, parts, axis=1)
        paths = paths.cumprod(axis=1)
        is_verified = np.arange(paths.shape[1]) < verified
        accepted = np.zeros_like(is_verified)
        for row, i in enumerate(own):
            count = len(output.sampled_token_ids[i])
            accepted[row, output.accepted_nodes[0, i, 1:count] - 1] = True
        self._chances.observe(paths[is_verified], accepted[is_verified])
        chances = self._chances.of(paths)
        names = [output.req_ids[i] for i in own]
        if paths.shape[1] >= self.nodes:
            known = chances[:, : self.nodes]
            self._known = dict(zip(names, known, strict=True))
        if step.verify_budget is not None:
            rows = zip(chains.astype(int), verified[:, 0], chances, strict=True)
            self.parts = dict(zip(names, (part_of(*row) for row in rows), strict=True))

    def gains(self, load: "Load") -> Mapping[int, float]:
        """Throughput that a budget adds to trees, as a share of what whole ones give;
        empty where it is not to be thought of."""
        n = load.num_reqs
        if n > MAX_TREE_REQUESTS:
            return {}
        latest = [*self._known.values(), *[self._average()] * n][:n]
        best = self.budgets.best(self.nodes, np.stack(latest), load.context)
        return {self.nodes: best.gain}

    def budget(self, step: "SchedulerOutput", context: float) -> int | None:
        """Nodes to verify in a step of trees; None: all that are scheduled.

        A batch with a grammar is left alone: its masks are laid out for whole trees.
        """
        drafts = step.scheduled_spec_decode_tokens
        longest = max(map(len, drafts.values()))
        if longest != self.nodes or step.has_structured_output_requests:
            return None
        survival = self._of(drafts)
        return self.budgets.best(self.nodes, survival, context).num_drafts

    def _of(self, names: Iterable[str]) -> np.ndarray:
        """[requests, N], the average for those of whom nothing is known."""
        average = self._average()
        return np.stack([self._known.get(name, average) for name in names])

    def _average(self) -> np.ndarray:
        """[N], chances of the nodes of a tree of which nothing is known."""
        if self._known:
            return np.mean([*self._known.values()], axis=0)
        expected = self._acceptance.expected_tokens()
        tokens = np.interp(range(self.nodes + 1), [*expected], [*expected.values()])
        return np.sort(np.diff(tokens).clip(0.0, 1.0))[::-1]


def part_of(chain: np.ndarray, num_verified: float, chances: np.ndarray) -> TreePart:
    """Of a tree whose first nodes were verified.

    Args:
        chain: [K], numbers of the nodes that hold the chain of best tokens.
        num_verified: nodes.
        chances: [N], of all nodes.
    """
    num_chain = int((chain <= num_verified).sum())
    of_chain = chances[chain[chain <= len(chances)] - 1]
    before = np.append(1.0, of_chain[:-1])
    rest = (of_chain / before.clip(1e-9))[num_chain:].tolist()
    unverified = np.where(np.arange(len(chances)) < num_verified, 0.0, chances)
    return TreePart(num_chain, rest, unverified.tolist())
