# SPDX-License-Identifier: Apache-2.0
"""How many drafts are accepted: synthetic, or from a recording of what drafters
predicted for real text, and what the target wrote.

With dummy weights nothing is accepted, so benchmarks replay a recording: acceptance
then varies by request, position and confidence as it did for real models. The files in
`traces/` say in their headers what was recorded, and with what.
"""

import json
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.spec_decode.results import EngineKey

FOLDER = Path(__file__).parent / "traces"
TEXTS = ("greedy", "t0.5", "t0.8")
NO_NODE = 255  # instead of a parent
# Files hold -log(probability) in units of this.
NATS = 1 / 8
# Tokens that each draft adds to a step, the same for every mode: 2.5 tokens on average
# with K=3, 3.0 with 5, 3.5 with 7, 4.0 with 11. vLLM's synthetic acceptance gives these
# lengths with as little variance as possible, so that short rounds are comparable. For
# a real drafter with so little variance another K would be best.
GAIN = (0.7, 0.45, 0.35, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
EQUAL = "equal"
RECORDED = "recorded-"
# Modes without recordings of their own, and whose they replay.
LENT = {"pard": "peagle", "pard2": "peagle", "draft": "eagle3", "mtp": "eagle3"}
LENT["lilicorr"] = "dflash2"


@dataclass(frozen=True)
class Trace:
    """One row for each position of the recorded texts, text after text.

    Row p of a text has the tree that is drafted when its token p is the newest one, its
    nodes best first: the first N are the tree of N nodes. A step at row p continues at
    row p + accepted + 1, with any method.

    Attributes:
        parents: [rows, nodes] uint8, the parent of each node, from node 1 on: 0 is the
            newest token, NO_NODE means that the node does not exist.
        reached: [rows] uint8, the last of the nodes that the text goes on with, 0 if it
            goes on with none.
        chain: [rows] uint8, drafts of the longest chain that the text goes on with.
        confidence: [rows, K] float32, the drafter's, in the drafts of that chain.
        lengths: [texts] rows of each text.
        header: what was recorded, with what, and when.
    """

    parents: np.ndarray
    reached: np.ndarray
    chain: np.ndarray
    confidence: np.ndarray
    lengths: np.ndarray
    header: dict[str, Any]

    @staticmethod
    def load(name: str, folder: Path = FOLDER) -> "Trace":
        """Loads a recording by name, such as "eagle3-t0.5"."""
        with np.load(folder / f"{name}.npz") as data:
            nats = NATS * data["nats"].T.astype(np.float32)
            return Trace(
                data["parents"].T,
                data["reached"],
                data["chain"],
                np.exp(-nats),
                data["lengths"],
                json.loads(str(data["header"])),
            )

    def save(self, path: Path) -> None:
        nats = -np.log(np.maximum(self.confidence, np.finfo(np.float32).tiny)) / NATS
        np.savez_compressed(
            path,
            # What is of one node or depth compresses best beside each other.
            parents=self.parents.T,
            reached=self.reached,
            chain=self.chain,
            nats=nats.round().clip(0, 255).astype(np.uint8).T,
            lengths=self.lengths.astype(np.int32),
            header=np.array(json.dumps(self.header)),
        )

    @property
    def depth(self) -> int:
        """Drafts of the longest chain (K), and of a path in the tree."""
        return self.confidence.shape[1]

    @property
    def has_passes(self) -> bool:
        """Whether each depth of a tree took a pass of the drafter."""
        return self.header.get("is_autoregressive", False)

    @cached_property
    def depths(self) -> np.ndarray:
        """[rows, nodes + 1], of the newest token and the nodes; 0 for NO_NODE."""
        depths = np.zeros((len(self.parents), self.parents.shape[1] + 1), np.uint8)
        for node, parents in enumerate(self.parents.T, start=1):
            above = np.where(parents == NO_NODE, 0, parents)[:, None]
            below = np.take_along_axis(depths, above, 1)[:, 0] + 1
            depths[:, node] = np.where(parents == NO_NODE, 0, below)
        return depths

    @cached_property
    def ranks(self) -> np.ndarray:
        """[rows, nodes] uint8, of each node among the children of its parent."""
        ranks = np.zeros_like(self.parents)
        for node, parents in enumerate(self.parents.T):
            ranks[:, node] = (self.parents[:, :node] == parents[:, None]).sum(1)
        return ranks

    @cached_property
    def path(self) -> np.ndarray:
        """[rows, K], the nodes that the text goes on with by depth; else NO_NODE."""
        path = np.full((len(self.parents), self.depth), NO_NODE)
        at, rows = self.reached.astype(int), np.arange(len(self.parents))
        while at.any():
            rows, at = rows[at > 0], at[at > 0]
            path[rows, self.depths[rows, at] - 1] = at
            at = self.parents[rows, at - 1].astype(int)
        return path

    def within(self, depth: int) -> "Trace":
        """Without what is deeper; the other nodes keep their order."""
        if depth >= self.depth:
            return self
        kept = (self.depths > 0) & (self.depths <= depth)
        kept[:, 0] = True
        order = np.argsort(~kept, axis=1, kind="stable")
        number = np.argsort(order, axis=1).astype(np.uint8)  # of each node from now on
        number = np.where(kept, number, NO_NODE).astype(np.uint8)
        above = np.where(self.parents == NO_NODE, 0, self.parents)
        parents = np.take_along_axis(number, above, 1)
        parents = np.where(kept[:, 1:], parents, NO_NODE).astype(np.uint8)
        path = np.where(self.path == NO_NODE, 0, self.path)[:, :depth].max(1)
        return replace(
            self,
            parents=np.take_along_axis(parents, order[:, 1:] - 1, 1),
            reached=np.take_along_axis(number, path[:, None], 1)[:, 0],
            chain=np.minimum(self.chain, depth),
            confidence=self.confidence[:, :depth],
        )

    def accepted(self, num_drafts: int, num_nodes: int | None = None) -> np.ndarray:
        """[rows], drafts that steps accept of a chain, or of a tree.

        Args:
            num_drafts: length of the chain, or depth of the tree.
            num_nodes: nodes of the tree; None for a chain.
        """
        if num_nodes is None:
            return np.minimum(self.chain, num_drafts)
        return (self.within(num_drafts).path <= num_nodes).sum(1)


def tokens_per_step(
    trace: Trace, num_drafts: int, num_nodes: int | None = None
) -> float:
    """Mean tokens of a step; arguments as of `Trace.accepted`."""
    accepted = trace.accepted(num_drafts, num_nodes).tolist()
    tokens, steps, start = 0, 0, 0
    for length in trace.lengths.tolist():
        at = start
        while at < start + length:
            at += accepted[at] + 1
            steps += 1
        tokens += at - start
        start += length
    return tokens / steps


def equal_length(num_drafts: int) -> float:
    """Mean tokens of a step; drafts after the 11th gain as much as the 11th."""
    return 1 + sum((GAIN + GAIN[-1:] * num_drafts)[:num_drafts])


def recording(label: str, key: EngineKey) -> str | None:
    """Name of the recording that an engine replays for a label; None if it has none."""
    if not label.startswith(RECORDED) or key.mode == "none":
        return None
    return f"{LENT.get(key.mode, key.mode)}-{label.removeprefix(RECORDED)}"


@cache
def recorded_length(name: str, depth: int, num_drafts: int, is_auto: bool) -> float:
    """Mean tokens of a step over a whole recording, not just what a round replays.

    Args:
        num_drafts: of a chain, or above `depth` nodes of a tree.
        is_auto: the engine chose it: trees that take passes are less deep if small.
    """
    trace = Trace.load(name)
    if num_drafts <= depth:
        return tokens_per_step(trace, num_drafts)
    if is_auto and trace.has_passes:
        from vllm.config.drafter import depth_with_passes  # not in vLLM's release

        depth = depth_with_passes(num_drafts, depth)
    return tokens_per_step(trace, depth, num_drafts)


def expected_length(
    label: str, key: EngineKey, drafted: dict[int, int]
) -> float | None:
    """Expected tokens per step of a round, by its label's mean acceptance.

    The acceptance of a single round varies more than the differences to be measured;
    its step time does not.

    Args:
        drafted: if the engine chooses, number of steps by how much they drafted: a
            number above K is the nodes of a tree.
    """
    name, k = recording(label, key), key.num_tokens
    if name is None:
        return equal_length(k)
    if not key.is_auto:
        return recorded_length(name, k, key.tree or k, False)
    lengths = {n: recorded_length(name, k, n, True) for n in drafted}
    steps = sum(drafted.values())
    return sum(n * lengths[d] for d, n in drafted.items()) / steps if steps else None
