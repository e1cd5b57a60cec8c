# SPDX-License-Identifier: Apache-2.0
"""Records what a drafter drafts after every token of the target's text.

An engine that drafts trees writes the answers, and no draft is ever accepted, so that a
step makes one token, the target's own. What the drafter's passes rank is kept: every
family that the unified speculator drafts trees for is recorded in this way.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.spec_decode.trace_acceptance import DEPTH
from benchmarks.spec_decode.traces import NO_RANK, Trace
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler
from vllm.v1.worker.gpu.spec_decode.unified.tree.verify import TreeRejectionSampler

Drafts = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Recorder:
    """Patches the engine of this process: make it before the engine, which must run
    without CUDA graphs.

    Attributes:
        is_autoregressive: whether passes continue their best drafts.
        drafts: since the last `add`, by request and newest position: log-probabilities
            and tokens of the candidates, by depth.
    """

    def __init__(self) -> None:
        self.is_autoregressive = False
        self.drafts: dict[str, dict[int, Drafts]] = {}
        self._names: dict[int, str] = {}  # by request state
        self._pass = 0
        self._rows: list[tuple[np.ndarray, np.ndarray]] = []
        self._lengths: list[int] = []
        runner, sampler, verifier = GPUModelRunner, DraftSampler, TreeRejectionSampler
        runner.add_requests = self._naming(runner.add_requests)
        sampler.sample_tree = self._counting(sampler.sample_tree)
        sampler.rank_candidates = self._keeping(sampler.rank_candidates)
        verifier._verify = _refusing(verifier._verify)

    def _naming(self, add_requests: Any) -> Any:
        def named(runner, scheduled):
            add_requests(runner, scheduled)
            for new in scheduled.scheduled_new_reqs:
                slot = runner.req_states.req_id_to_index[new.req_id]
                self._names[slot] = new.req_id
                self.drafts[new.req_id] = defaultdict(dict)

        return named

    def _counting(self, sample_tree: Any) -> Any:
        def counted(sampler, rows, plan, draft_pass):
            self._pass = draft_pass
            self.is_autoregressive = plan.layout.num_passes > 1
            sample_tree(sampler, rows, plan, draft_pass)

        return counted

    def _keeping(self, rank_candidates: Any) -> Any:
        def kept(sampler, rows, plan):
            ranked = rank_candidates(sampler, rows, plan)
            n, samples = rows.shape[:2]
            batch, first = sampler.inputs.batch, self._pass * samples
            newest = batch.sample_positions[: n * samples : samples] - first
            log_probs, tokens = (each.view(n, samples, -1).cpu() for each in ranked)
            slots = batch.idx_mapping[:n].tolist()
            for at, (slot, position) in enumerate(
                zip(slots, newest.tolist(), strict=True)
            ):
                if slot in self._names:
                    found = zip(log_probs[at], tokens[at], strict=True)
                    self.drafts[self._names[slot]][position] |= enumerate(found, first)
            return ranked

        return kept

    def add(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> None:
        """Adds the texts of all requests since the last time, in their order."""
        names = sorted(self.drafts, key=lambda name: int(name.partition("-")[0]))
        for name, prompt, answer in zip(names, prompts, answers, strict=True):
            steps = range(max(0, len(answer) - DEPTH))
            self._lengths.append(len(steps))
            self._rows += [
                self._row(self.drafts[name][len(prompt) + step], answer[step + 1 :])
                for step in steps
            ]
        self.drafts.clear()

    def _row(self, drafts: Drafts, text: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities [DEPTH, candidates] and ranks [DEPTH] of one step."""
        probs = np.zeros((DEPTH, len(drafts[0][0])), np.float32)
        ranks = np.full(DEPTH, NO_RANK, np.uint8)
        for depth, (log_probs, tokens) in sorted(drafts.items()):
            probs[depth] = log_probs.exp()
            found = (tokens == text[depth]).nonzero()
            if len(found) and not (self.is_autoregressive and ranks[:depth].any()):
                ranks[depth] = int(found[0])
        return probs, ranks

    def take(self, header: dict[str, Any]) -> Trace:
        """The recording of all texts that were added; then there are none."""
        header |= {"is_autoregressive": self.is_autoregressive}
        probs, ranks = (np.stack(part) for part in zip(*self._rows, strict=True))
        trace = Trace(probs, ranks, np.array(self._lengths), header)
        self._rows, self._lengths = [], []
        return trace


def _refusing(verify: Any) -> Any:
    def refused(self, *args):
        *others, nodes = args
        return verify(self, *others, torch.full_like(nodes, -1))

    return refused
