# SPDX-License-Identifier: Apache-2.0
"""Beams: what each pass continues, and what it attends to."""

from types import SimpleNamespace

import pytest
import torch

from vllm.config.drafter import CANDIDATES_OF_PASS
from vllm.v1.worker.gpu.spec_decode.unified.tree.attend import Scores, attend_rows
from vllm.v1.worker.gpu.spec_decode.unified.tree.grow import Beams

from ..batches import DEVICE
from .reference import attend
from .test_kernels import tensor

R, N, K, B = 6, 3, 4, 4


class Passes:
    """Beams after some passes over random candidates, and what they are in Python."""

    def __init__(
        self, num_passes: int, count: int = CANDIDATES_OF_PASS, beams: int = B
    ):
        torch.manual_seed(num_passes + count)
        self.beams, self.num_beams = Beams(R, K, beams, DEVICE), beams
        self.drafts = torch.full((R, K), -7, device=DEVICE)
        # By request, of the rows of the last pass: score, and numbers of the rows that
        # it attends to.
        self.rows = [[(0.0, [])] for _ in range(N)]
        self.tokens, self.parents = [], []
        for depth in range(num_passes):
            self.extend(depth, count)

    def extend(self, depth: int, count: int) -> None:
        shape = N, self.num_beams if depth else 1, 1, count
        logits = torch.randn(shape, device=DEVICE).sort(descending=True).values
        log_probs = logits.log_softmax(-1)
        tokens = torch.randint(99, shape, device=DEVICE)
        self.requests = torch.randint(-1, R, (N,), device=DEVICE)
        given = log_probs, tokens, self.requests, self.drafts[:N]
        self.beams.extend(depth, *given)
        assert self.drafts[:N, depth].equal(tokens[:, 0, 0, 0])
        self.tokens, self.parents = [], []
        for req in range(N):
            self.rows[req] = self.continued(
                depth, self.rows[req], log_probs[req, :, 0], tokens[req, :, 0]
            )

    def continued(self, depth, rows, log_probs, tokens):
        """The rows of the next pass: the chain, then the likeliest of the rest."""
        scores = torch.tensor([score for score, _ in rows])[:, None] + log_probs.cpu()
        order = scores.flatten().argsort(descending=True, stable=True).tolist()
        order.remove(0)
        picks = [0, *order[: self.num_beams - 1]]
        parents = [at // log_probs.shape[1] for at in picks]
        self.parents.append(parents)
        self.tokens.append([int(tokens.flatten()[at]) for at in picks])
        return [
            (
                float(scores.flatten()[at]),
                [*rows[parent][1], depth * self.num_beams + j],
            )
            for j, (at, parent) in enumerate(zip(picks, parents, strict=True))
        ]

    def seen(self, req: int, num_rows: int) -> torch.Tensor:
        """[B, num_rows] bool, which rows so far each of the last pass attends to."""
        seen = torch.zeros(self.num_beams, num_rows, dtype=torch.bool)
        for row, (_, numbers) in enumerate(self.rows[req]):
            seen[row, numbers] = True
        return seen


@pytest.mark.parametrize("beams", [1, B])
@pytest.mark.parametrize("count", [4, CANDIDATES_OF_PASS])
def test_passes_continue_likeliest_nodes(count: int, beams: int):
    """A small vocabulary has fewer candidates: the others are impossible."""
    made = Passes(K, count, beams)
    previous = made.beams.previous(N)
    assert previous.draft_tokens.tolist() == made.tokens
    assert previous.parents.tolist() == made.parents
    assert made.beams.sample_requests[:N, -1].equal(made.requests)
    assert made.beams.candidates.log_probs[..., count:][:N, 1:].eq(-torch.inf).all()
    masks = made.beams.rows.masks.view(R, beams, 2)
    for req in range(N):
        bits = [sum(1 << number for number in row[1]) for row in made.rows[req]]
        assert masks[req, :, 0].tolist() == bits
    # Other requests are left alone.
    assert made.beams.sample_requests[N:].eq(-1).all()
    assert made.drafts[N:].eq(-7).all()


@pytest.mark.parametrize("window", [0, 3, 20])
@pytest.mark.parametrize("num_passes", [1, 2, K])
def test_beams_attend_to_prefix_and_ancestors(num_passes: int, window: int):
    """Ancestors are in the KV cache, behind the prefix; one request has none."""
    made, prefix = Passes(num_passes), [17, 0, 32]
    heads, kv_heads, size, block, num_rows = 4, 2, 24, 16, num_passes * B
    pool = torch.randn(16, block, kv_heads, 2 * size, device=DEVICE)
    table = torch.randperm(16, device=DEVICE).int()[:12].view(3, 4)
    seq_lens = tensor([p + num_rows for p in prefix])
    layer = SimpleNamespace()
    for number in range(1, num_passes + 1):
        lengths = seq_lens - (num_passes - number) * B
        made.beams.attach({"layer": layer}, number, lengths)
    scores, bounds = Scores(0.3, window=window), tensor(range(0, N * B + 1, B))
    query = torch.randn(N * B, heads, size, device=DEVICE)
    metadata = SimpleNamespace(
        query_start_loc=bounds, block_table=table, draft_tree=layer.draft_tree
    )
    out, wanted = torch.zeros_like(query), []
    keys = [
        pool[table[req].long()].flatten(0, 1)[: prefix[req] + num_rows]
        for req in range(N)
    ]
    attend_rows(query, pool.transpose(1, 2), metadata, scores, out)
    places = torch.arange(num_rows) // B
    for req in range(N):
        each = keys[req].unflatten(-1, (2, size)).unbind(2)
        rows = query[req * B : (req + 1) * B]
        seen = made.seen(req, num_rows)
        wanted.append(attend(rows, *each, scores, seen, places))
    torch.testing.assert_close(out, torch.cat(wanted), atol=1e-4, rtol=1e-4)
