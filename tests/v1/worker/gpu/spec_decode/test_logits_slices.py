# SPDX-License-Identifier: Apache-2.0
"""Logits of many sampled slots are computed in slices, with unchanged results."""

from types import SimpleNamespace

import pytest
import torch

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.spec_decode.draft_tree.drafting import rank_candidates
from vllm.v1.worker.gpu.spec_decode.unified import slices
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout
from vllm.v1.worker.gpu.spec_decode.unified.plan import draft_plans
from vllm.v1.worker.gpu.spec_decode.unified.sampling import sample_chain
from vllm.v1.worker.gpu.spec_decode.unified.slices import request_slices
from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator
from vllm.v1.worker.gpu.spec_decode.unified.vocabulary import Vocabulary

VOCAB, HIDDEN, REQUESTS, DRAFTS = 300, 8, 11, 5
DEVICE = torch.device(current_platform.device_type)
ROW = VOCAB * 4  # bytes of a row of logits


@pytest.fixture(autouse=True)
def on_device():
    with DEVICE:
        yield


@pytest.mark.parametrize("most", [1, 3, 10, 11, 100])
@pytest.mark.parametrize("num_reqs", [1, 10, 11, 1024])
def test_slices_cover_each_request_once(num_reqs: int, most: int, monkeypatch):
    monkeypatch.setattr(slices, "MAX_LOGITS_BYTES", most * 7 + 6)
    found = list(request_slices(num_reqs, 7))
    assert [n for part in found for n in range(num_reqs)[part]] == [*range(num_reqs)]
    sizes = [part.stop - part.start for part in found]
    assert max(sizes) <= most and max(sizes) - min(sizes) <= 1
    assert len(found) == -(-num_reqs // most)


def test_requests_are_not_split(monkeypatch):
    monkeypatch.setattr(slices, "MAX_LOGITS_BYTES", 1)
    assert list(request_slices(2, 7)) == [slice(0, 1), slice(1, 2)]


def whole_numbers(*shape: int) -> torch.Tensor:
    """Random whole numbers: products are exact in any order of summation."""
    return torch.randint(-9, 10, shape).float()


class Drafting:
    """A speculator that samples, and the numbers of rows of logits that it computes."""

    def __init__(self, method: str, width: int) -> None:
        torch.manual_seed(0)
        self.rows: list[int] = []
        weight = whole_numbers(HIDDEN, VOCAB)
        self.made = made = UnifiedSpeculator.__new__(UnifiedSpeculator)
        made.layout = DraftLayout(DRAFTS, 0, width)
        made.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(head_dtype=torch.float32)
        )
        made.num_speculative_steps = DRAFTS
        made.device, made._num_reqs = DEVICE, REQUESTS
        made.buffers = DraftBuffers(made.layout, 64, REQUESTS, DEVICE)
        batch = made.buffers.batch
        batch.sample_positions.copy_(torch.arange(REQUESTS * width) * 3)
        requests = torch.arange(REQUESTS).flip(0).repeat_interleave(width)
        batch.sample_requests.copy_(requests)
        made.temperature, made.seeds = torch.rand(REQUESTS), torch.arange(REQUESTS)
        made.use_local_argmax_reduction = made.use_fp64_gumbel = False
        made.verifies_blocks, made.draft_watermarker = False, None
        made.acceptance_estimator = self
        made.draft_token_confidence_probs = torch.zeros(REQUESTS, DRAFTS)
        made.draft_tokens = torch.zeros(REQUESTS, DRAFTS, dtype=torch.int64)
        made.draft_logits, made.sampled_slots = None, {}
        made.drafter = SimpleNamespace(vocabulary=Vocabulary(VOCAB))
        if method == "probabilistic":
            made.draft_logits = torch.zeros(REQUESTS, DRAFTS, VOCAB)
        made.model = SimpleNamespace(
            compute_logits=lambda rows: self.seen(rows) @ weight
        )

    def seen(self, rows: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(rows))
        return rows

    def predict(self, logits, requests, columns, confidence, temperature) -> None:
        confidence[requests, columns.long()] = logits.softmax(-1).amax(-1)

    def chain(self) -> list[torch.Tensor]:
        made, plan = (
            self.made,
            draft_plans(self.made.layout, {DRAFTS: DRAFTS}, REQUESTS, DEVICE),
        )
        width = made.layout.parallel_width
        states = whole_numbers(made.layout.num_passes, REQUESTS, width, HIDDEN)
        for draft_pass, hidden in enumerate(states):
            samples = plan[DRAFTS].num_samples(draft_pass)
            sample_chain(made, hidden[:, :samples], plan[DRAFTS], draft_pass)
        kept = made.draft_tokens, made.draft_token_confidence_probs, made.draft_logits
        return [tensor for tensor in kept if tensor is not None]

    def tree(self) -> list[torch.Tensor]:
        only = SimpleNamespace(num_passes=1)
        plan = SimpleNamespace(num_drafts=15, layout=only)
        hidden = whole_numbers(REQUESTS, DRAFTS, HIDDEN)
        return list(rank_candidates(self.made, hidden, plan, 0))


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
    monkeypatch.setattr(slices, "MAX_LOGITS_BYTES", rows * ROW)
    parts = Drafting(method, width)
    found = getattr(parts, what)()
    assert all(map(torch.equal, found, expected))
    assert max(parts.rows) <= max(rows, width)
    assert sum(parts.rows) == sum(whole.rows)


def test_logits_of_large_batch_take_at_most_half_a_gigabyte():
    """1024 requests and 8 drafts with Llama 3's vocabulary: 2.1 GB in one slice."""
    made = UnifiedSpeculator.__new__(UnifiedSpeculator)
    config = SimpleNamespace(head_dtype=torch.bfloat16)
    made.vllm_config = SimpleNamespace(model_config=config)
    made.drafter = SimpleNamespace(vocabulary=Vocabulary(128256))
    sizes = [8 * (part.stop - part.start) for part in made.slices(1024, 8)]
    assert sum(sizes) == 8192 and max(sizes) * 128256 * 2 <= 1 << 29
    assert len(sizes) == 4
    assert list(made.slices(64, 8)) == [slice(0, 64)]
