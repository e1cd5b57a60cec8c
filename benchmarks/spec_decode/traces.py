# SPDX-License-Identifier: Apache-2.0
"""How many drafts are accepted: synthetic, or from a recording of what drafters
predicted for real text, and what the target wrote.

With dummy weights nothing is accepted, so benchmarks replay a recording: acceptance
then varies by request, position and confidence as it did for real models. The files in
`traces/` say in their headers what was recorded, and with what.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.spec_decode.results import EngineKey
from tests.v1.worker.gpu.spec_decode.draft_tree.reference import Node, best_first

FOLDER = Path(__file__).parent / "traces"
TEXTS = ("greedy", "t0.5", "t0.8")
# Instead of a rank: the target's token is none of the recorded candidates.
NO_RANK = 255
# Files hold -log(probability) in units of this, as differences between ranks.
NATS = 1 / 8
# Tokens that each draft adds to a step, the same for every mode: 2.5 tokens on average
# with K=3, 3.0 with 5, 3.5 with 7, 4.0 with 11. vLLM's synthetic acceptance gives these
# lengths with as little variance as possible, so that short rounds are comparable. For
# a real drafter with so little variance another K would be best.
GAIN = (0.7, 0.45, 0.35, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125)
EQUAL = "equal"
RECORDED = "recorded-"


@dataclass(frozen=True)
class Trace:
    """One row for each position of the recorded texts, text after text.

    Row p of a text has the drafts that are made when its token p is the newest one. A
    step at row p continues at row p + accepted + 1, with any method.

    Attributes:
        probs: [rows, depth, width] float32, of the most likely tokens at each depth.
        ranks: [rows, depth] uint8, rank among them of the token that the target wrote.
            Autoregressive drafters continue their own drafts: after the first one that
            is not the best token all ranks are NO_RANK.
        lengths: [texts] rows of each text.
        header: what was recorded, with what, and when.
    """

    probs: np.ndarray
    ranks: np.ndarray
    lengths: np.ndarray
    header: dict[str, Any]

    @property
    def continues_best(self) -> bool:
        """Whether only the best node of a depth has children in trees."""
        return self.header.get("is_autoregressive", False)

    @staticmethod
    def load(name: str, folder: Path = FOLDER) -> "Trace":
        """Loads a recording by name, such as "pard-t0.5"."""
        with np.load(folder / f"{name}.npz") as data:
            steps = data["steps"].transpose(2, 1, 0).astype(np.float32)
            probs = np.exp(-NATS * steps.cumsum(axis=-1)).astype(np.float32)
            header = json.loads(str(data["header"]))
            return Trace(probs, data["ranks"], data["lengths"], header)

    def save(self, path: Path) -> None:
        nats = -np.log(np.maximum(self.probs, np.finfo(np.float32).tiny))
        steps = np.diff(np.round(nats / NATS), axis=-1, prepend=0)
        np.savez_compressed(
            path,
            # Of one rank and depth beside each other, they compress best.
            steps=steps.clip(0, 255).astype(np.uint8).transpose(2, 1, 0),
            ranks=self.ranks,
            lengths=self.lengths.astype(np.int32),
            header=np.array(json.dumps(self.header)),
        )


def among_candidates(probs: np.ndarray, width: int) -> np.ndarray:
    """Normalized over the `width` best tokens as in `best_candidates`.

    Returns:
        [..., depth, width].
    """
    kept = probs[..., :width]
    return kept / kept.sum(-1, keepdims=True)


def accepted_of_chain(ranks: Sequence[int], num_drafts: int) -> int:
    """Number of drafts accepted: the leading ones that the target wrote too."""
    most = min(num_drafts, len(ranks))
    return next((d for d in range(most) if ranks[d] != 0), most)


def accepted_of_tree(ranks: Sequence[int], nodes: list[Node]) -> list[int]:
    """Nodes accepted: at each node, the child whose token the target wrote."""
    children = {(node.parent, node.rank): at for at, node in enumerate(nodes, start=1)}
    path = [0]
    for rank in ranks:
        child = children.get((path[-1], rank))
        if child is None:
            break
        path.append(child)
    return path[1:]


def walk(trace: Trace, accepted: Sequence[int]) -> list[list[int]]:
    """Number of drafts accepted in each step, by text.

    Args:
        accepted: [rows] drafts accepted by a step that begins at the row.
    """
    texts, start = [], 0
    for length in trace.lengths.tolist():
        steps, at = [], 0
        while at < length:
            steps.append(int(accepted[start + at]))
            at += steps[-1] + 1
        texts.append(steps)
        start += length
    return texts


def tokens_per_step(
    trace: Trace, num_drafts: int, num_nodes: int | None = None
) -> float:
    """Mean tokens of a step that drafts a chain, or a best-first tree.

    Args:
        num_drafts: length of the chain, or depth of the tree.
        num_nodes: nodes of the tree; None for a chain.
    """
    if num_nodes is None:
        counts = [accepted_of_chain(row, num_drafts) for row in trace.ranks.tolist()]
    else:
        from vllm.config.drafter import num_candidates  # not in vLLM's release

        only_best = trace.continues_best
        width = num_candidates(num_nodes, not only_best)
        grow = partial(best_first, num_nodes=num_nodes, continues_best=only_best)
        counts = [
            len(accepted_of_tree(ranks, grow(log_probs)))
            for log_probs, ranks in zip(
                np.log(among_candidates(trace.probs[:, :num_drafts], width)).tolist(),
                trace.ranks[:, :num_drafts].tolist(),
                strict=True,
            )
        ]
    steps = [count for text in walk(trace, counts) for count in text]
    return 1 + sum(steps) / len(steps)


def equal_length(num_drafts: int) -> float:
    """Mean tokens of a step; drafts after the 11th gain as much as the 11th."""
    return 1 + sum((GAIN + GAIN[-1:] * num_drafts)[:num_drafts])


def recording(label: str, key: EngineKey) -> str | None:
    """Name of the recording that an engine replays for a label; None if it has none."""
    if not label.startswith(RECORDED) or key.mode == "none":
        return None
    mode = "pard" if key.mode == "pard2" else key.mode  # no recordings of its own
    return f"{mode}-{label.removeprefix(RECORDED)}"


@cache
def recorded_length(name: str, num_drafts: int, tree: int = 0) -> float:
    """Mean tokens of a step over a whole recording, not just what a round replays."""
    return tokens_per_step(Trace.load(name), num_drafts, tree or None)


def _recorded_of_auto(name: str, depth: int, num_drafts: int) -> float:
    """`recorded_length` of a choice of "auto": nodes of a tree if above `depth`."""
    if num_drafts <= depth:
        return recorded_length(name, num_drafts)
    # Not in vLLM's release.
    from vllm.config.drafter.drafter import depth_with_passes

    if Trace.load(name).continues_best:
        depth = depth_with_passes(num_drafts, depth)
    return recorded_length(name, depth, num_drafts)


def expected_length(
    label: str, key: EngineKey, drafted: dict[int, int]
) -> float | None:
    """Expected tokens per step of a round, by its label's mean acceptance.

    The acceptance of a single round varies more than the differences to be measured;
    its step time does not. None with adaptive verification, since only the round itself
    tells how many drafts its steps verified.

    Args:
        drafted: if the engine chooses, number of steps by how much they drafted: a
            number above K is the nodes of a tree.
    """
    name, k = recording(label, key), key.num_tokens
    if name is None:
        return equal_length(k)
    if key.is_adaptive:
        return None
    if not key.is_auto:
        return recorded_length(name, k, key.tree)
    lengths = {n: _recorded_of_auto(name, k, n) for n in drafted}
    steps = sum(drafted.values())
    return sum(n * lengths[d] for d, n in drafted.items()) / steps if steps else None
