# SPDX-License-Identifier: Apache-2.0
"""Logits of many sampled slots are computed in slices, with unchanged results."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.unified import sampler
from vllm.v1.worker.gpu.spec_decode.unified.inputs import DraftInputs
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.sampler import DraftSampler, Vocabulary

from .batches import DEVICE, plan_of

VOCAB, HIDDEN, REQUESTS, DRAFTS = 300, 8, 11, 5
ROW = VOCAB * 4  # bytes of a row of logits


@pytest.fixture(autouse=True)
def on_device():
    with DEVICE:
        yield


def slices(num_reqs: int, samples: int = 1, vocab: int = 7) -> list[slice]:
    """Of logits of one byte each."""
    made = DraftSampler(torch.zeros(1, 1), None, None, logit_bytes=1)
    made.vocabulary = Vocabulary(vocab)
    return list(made.slices(num_reqs, samples))


@pytest.mark.parametrize("most", [0, 1, 3, 10, 11, 100])
@pytest.mark.parametrize("num_reqs", [1, 10, 11, 1024])
def test_slices_cover_each_request_once(num_reqs: int, most: int, monkeypatch):
    """A slice has at least one request, however few bytes there may be."""
    monkeypatch.setattr(sampler, "MAX_LOGITS_BYTES", most * 7 + 6)
    found, most = slices(num_reqs), max(most, 1)
    assert [n for part in found for n in range(num_reqs)[part]] == [*range(num_reqs)]
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(found) == -(-num_reqs // most)


def whole_numbers(*shape: int) -> torch.Tensor:
    """Random whole numbers: products are exact in any order of summation."""
    return torch.randint(-9, 10, shape).float()


class Drafting:
    """A sampler, and the numbers of rows of logits that it computes."""

    def __init__(self, method: str, width: int) -> None:
        torch.manual_seed(0)
        self.rows: list[int] = []
        weight = whole_numbers(HIDDEN, VOCAB)
        layout = DraftLayout(DRAFTS, 0, width)
        self.plan = plan_of(layout)
        inputs = DraftInputs(layout, 64, REQUESTS, DEVICE)
        inputs.batch.sample_positions.copy_(torch.arange(REQUESTS * width) * 3)
        requests = torch.arange(REQUESTS).flip(0).repeat_interleave(width)
        inputs.batch.sample_requests.copy_(requests)
        self.temperature, self.seeds = torch.rand(REQUESTS), torch.arange(REQUESTS)
        self.confidence = torch.zeros(REQUESTS, DRAFTS)
        self.logits: torch.Tensor | None = None
        if method == "probabilistic":
            self.logits = torch.zeros(REQUESTS, DRAFTS, VOCAB)
        self.exchanges_best = False
        drafts = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int64)
        self.sampler = made = DraftSampler(drafts, inputs, self.sample, 4)
        made.vocabulary = Vocabulary(VOCAB)
        made.model = SimpleNamespace(
            compute_logits=lambda rows: self.seen(rows) @ weight
        )

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(rows))
        return rows

    def sample(self, states, positions, requests, columns) -> torch.Tensor:
        model, vocabulary = self.sampler.model, self.sampler.vocabulary
        if self.exchanges_best:
            return vocabulary.best_tokens(model, states)
        logits = vocabulary.logits(model, states)
        self.confidence[requests, columns.long()] = logits.softmax(-1).amax(-1)
        if self.logits is None:
            return logits.argmax(-1)
        return gumbel_sample(
            logits, requests, self.temperature, self.seeds, positions,
            apply_temperature=True, is_drafting=False, logits_cache=self.logits,
            logits_cache_col=columns,
        )  # fmt: skip

    def chain(self) -> list[torch.Tensor]:
        layout = self.plan.layout
        states = whole_numbers(
            layout.num_passes, REQUESTS, layout.parallel_width, HIDDEN
        )
        for draft_pass, hidden in enumerate(states):
            samples = self.plan.num_samples(draft_pass)
            self.sampler.sample(hidden[:, :samples], self.plan, draft_pass)
        found = self.sampler.drafts, self.confidence, self.logits
        return [tensor for tensor in found if tensor is not None]

    def tree(self) -> list[torch.Tensor]:
        tree = self.plan._replace(num_drafts=15)
        hidden = whole_numbers(REQUESTS, DRAFTS, HIDDEN)
        return list(self.sampler.rank_candidates(hidden, tree))


@pytest.mark.parametrize("rows", [1, 12, 30])
@pytest.mark.parametrize(
    "what, method, width",
    [
        ("chain", "greedy", DRAFTS),
        ("chain", "probabilistic", DRAFTS),
        ("chain", "probabilistic", 2),
        ("chain", "greedy", 1),
        ("tree", "greedy", DRAFTS),
    ],
)
def test_samples_do_not_depend_on_slices(
    what: str, method: str, width: int, rows: int, monkeypatch
):
    whole = Drafting(method, width)
    expected = getattr(whole, what)()
    assert max(whole.rows) == REQUESTS * width
    monkeypatch.setattr(sampler, "MAX_LOGITS_BYTES", rows * ROW)
    parts = Drafting(method, width)
    found = getattr(parts, what)()
    assert all(map(torch.equal, found, expected))
    assert max(parts.rows) <= max(rows, width)
    assert sum(parts.rows) == sum(whole.rows)


def test_logits_of_large_batch_take_at_most_half_a_gigabyte():
    """1024 requests and 8 drafts with Llama 3's vocabulary: 2.1 GB in one slice."""
    found = slices(1024, 8, vocab=2 * 128256)
    sizes = [8 * (part.stop - part.start) for part in found]
    assert sum(sizes) == 8192 and max(sizes) * 128256 * 2 <= 1 << 29
    assert len(sizes) == 4
    assert slices(64, 8, vocab=2 * 128256) == [slice(0, 64)]
