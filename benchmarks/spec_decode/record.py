# SPDX-License-Identifier: Apache-2.0
"""Records what a drafter drafts after every token of the target's text.

An engine that drafts trees writes the answers, and verifies no draft, so that a step
makes one token, the target's own. The trees are kept: every family that trees are grown
for is recorded in this way.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.spec_decode.trace_acceptance import after_propose, replacing
from benchmarks.spec_decode.traces import NO_NODE, Trace
from vllm import LLM
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator
from vllm.v1.worker.gpu.spec_decode.unified.tree.step import TreeStep


class Drafts(NamedTuple):
    """What is drafted after a token; in a batch all have a first dimension more.

    Attributes:
        parents: [nodes], of the tree; -1 where there is no node.
        nodes: [nodes], their tokens.
        confidence: [K], in the tokens of the chain.
        chain: [K], these tokens.
    """

    parents: torch.Tensor
    nodes: torch.Tensor
    confidence: torch.Tensor
    chain: torch.Tensor


def best_chain(
    log_probs: torch.Tensor, tokens: torch.Tensor, next_rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and tokens, [n, K] each; arguments are `Candidates`."""
    if next_rows is None:
        return log_probs[:, :, 0, 0].exp(), tokens[:, :, 0, 0]
    requests, row, found = torch.arange(len(tokens)), 0, []
    for depth in range(tokens.shape[1]):
        at = requests, depth, row, 0
        found.append((log_probs[at].exp(), tokens[at]))
        row = next_rows[at].clamp(min=0).long()
    probs, chain = zip(*found, strict=True)
    return torch.stack(probs, 1), torch.stack(chain, 1)


class Recorder:
    """Patches an engine in this process, which must run on a CPU or without CUDA
    graphs, and not schedule asynchronously.

    Attributes:
        drafts: since the last `add`, by request and the position of its newest token.
    """

    def __init__(self, llm: LLM) -> None:
        self.drafts: dict[str, dict[int, Drafts]] = defaultdict(dict)
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        self._is_unified = isinstance(runner.speculator, UnifiedSpeculator)
        self._has_passes = False
        self._grown: Drafts | None = None
        self._rows: list[tuple[list[int], int, int, list[float]]] = []
        self._lengths: list[int] = []
        Scheduler.update_draft_token_ids = lambda self, drafts: None
        replacing(TreeStep, "grow")(self._keep)
        after_propose(runner.speculator, self._place)

    def _keep(self, grow, step, candidates, requests, states, drafts, nodes) -> None:
        grow(step, candidates, requests, states, drafts, nodes)
        self._has_passes = self._is_unified and candidates.next_rows is not None
        chain = best_chain(*candidates)
        found = step.trees.parents[states, :nodes], drafts[:, :nodes], *chain
        self._grown = Drafts(*(each.cpu().clone() for each in found))

    def _place(self, given: dict[str, Any], drafts: torch.Tensor) -> None:
        grown, self._grown = self._grown, None
        if grown is not None and not given.get("dummy_run"):
            batch = given["input_batch"]
            newest = batch.seq_lens[: batch.num_reqs].tolist()
            for name, position, *each in zip(
                batch.req_ids, newest, *grown, strict=False
            ):
                self.drafts[name][position] = Drafts(*each)

    def add(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Adds the texts of all requests since the last time, in their order."""
        names = sorted(self.drafts, key=lambda name: int(name.partition("-")[0]))
        for name, prompt, answer in zip(names, prompts, answers, strict=True):
            found = self.drafts[name]
            depth = len(next(iter(found.values())).chain)
            steps = range(max(0, len(answer) - depth))
            self._lengths.append(len(steps))
            self._rows += [
                _row(found[len(prompt) + step], answer[step + 1 :]) for step in steps
            ]
        self.drafts.clear()

    def take(self, header: dict[str, Any]) -> Trace:
        """The recording of all texts that were added; then there are none."""
        header |= {"is_autoregressive": self._has_passes}
        parents, reached, chain, confidence = zip(*self._rows, strict=True)
        ints = (np.array(each, np.uint8) for each in (parents, reached, chain))
        probs = np.array(confidence, np.float32)
        trace = Trace(*ints, probs, np.array(self._lengths), header)
        self._rows, self._lengths = [], []
        return trace


def _row(drafts: Drafts, text: list[int]) -> tuple[list[int], int, int, list[float]]:
    """A row of a recording, if `text` follows the newest token."""
    parents, nodes, confidence, chain = (each.tolist() for each in drafts)
    numbers = {pair: n for n, pair in enumerate(zip(parents, nodes, strict=True), 1)}
    reached = 0
    for token in text[: len(chain)]:
        child = numbers.get((reached, token))
        if child is None:
            break
        reached = child
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chain, text, strict=False))
    parents = [NO_NODE if parent < 0 else parent for parent in parents]
    return parents, reached, len(list(same)), confidence
