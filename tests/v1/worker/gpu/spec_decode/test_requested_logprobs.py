# SPDX-License-Identifier: Apache-2.0
"""Logprobs of verified drafts are those that the sampler without drafts returns."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.states import RequestState

DEVICE = torch.device(current_platform.device_type)
VOCABULARY, K = 40, 3
STATES, ROWS = np.array([3, 0, 2, 1]), np.array([3, 1, 4, 2])  # of each request
ASKED = {
    "ids": [{"logprob_token_ids": [7, 31, 2]}, {}, {}, {"logprob_token_ids": [5]}],
    "likeliest": [{"logprobs": 2}, {}, {"logprobs": 0}, {}],
    "both": [{"logprob_token_ids": [39]}, {"logprobs": 4}, {}, {"logprobs": 1}],
    "nothing": [{}, {}, {}, {}],
}
CONFIG = SimpleNamespace(
    reasoning_config=None, model_config=SimpleNamespace(max_model_len=64)
)
SPECULATIVE = SimpleNamespace(
    num_speculative_tokens=K,
    enable_adaptive_verification=False,
    rejection_sample_method="standard",
    fly_entropy_threshold=None,
    fly_entropy_top_k=None,
    drafter=None,
)


def sampler_for(asked: list[dict]) -> Sampler:
    """A sampler with greedy requests, in the slots of STATES."""
    sizes = len(STATES), VOCABULARY, DEVICE
    states = RequestState(len(STATES), 64, 64, K, VOCABULARY, DEVICE)
    sampler = Sampler(CONFIG, *sizes, states)
    for state, given in zip(STATES, asked, strict=True):
        sampler.add_request(state, SamplingParams(temperature=0, **given))
    sampler.apply_staged_writes()
    return sampler


def batch(states: np.ndarray, rows: np.ndarray, tokens: torch.Tensor):
    """Requests with these states, numbers of rows, and [all rows] input tokens."""
    ends = np.concatenate(([0], rows.cumsum())).astype(np.int32)
    steps = np.concatenate([np.arange(count) for count in rows]).astype(np.int32)
    on_device = {
        "cu_num_logits": ends,
        "idx_mapping": states,
        "expanded_idx_mapping": np.repeat(states, rows),
        "expanded_local_pos": steps,
        "seq_lens": np.full(len(states), 20, np.int32),
        "positions": 20 + steps.astype(np.int64),
        "logits_indices": np.arange(len(tokens)),
    }
    return SimpleNamespace(
        num_reqs=len(states),
        cu_num_logits_np=ends,
        idx_mapping_np=states,
        seq_lens_cpu_upper_bound=torch.full((len(states),), 20),
        input_ids=tokens,
        **{name: torch.from_numpy(it).to(DEVICE) for name, it in on_device.items()},
    )


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("at_once", [100, 5], ids=["whole", "chunks"])
def test_logprobs_of_verified_drafts(monkeypatch, asked: str, at_once: int):
    """All drafts are accepted, so each row has a token."""
    monkeypatch.setattr(rejection_sampler, "get_max_chunk_logits", lambda _: at_once)
    torch.manual_seed(0)
    sampler, num_rows = sampler_for(ASKED[asked]), ROWS.sum()
    logits = torch.randn(num_rows, VOCABULARY, device=DEVICE)
    drafts = logits.argmax(-1).int().roll(1)
    verify = rejection_sampler.RejectionSampler(sampler, SPECULATIVE, DEVICE)
    found = verify(logits, batch(STATES, ROWS, drafts))
    assert found.num_sampled.tolist() == ROWS.tolist()
    ones = np.ones(num_rows, dtype=int)
    wanted = sampler(logits, batch(STATES.repeat(ROWS), ones, drafts))
    if asked == "nothing":
        assert found.logprobs_tensors is wanted.logprobs_tensors is None
        return
    assert found.logprobs_tensors.cu_num_generated_tokens == [0, 3, 4, 8, 10]
    for ours, alone in zip(
        found.logprobs_tensors[:3], wanted.logprobs_tensors[:3], strict=True
    ):
        assert torch.equal(ours, alone)
