# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters are copied to the device when a request is added, and kept."""

from types import SimpleNamespace

import pytest
import torch

from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

DEVICE = torch.device(current_platform.device_type)
REQUESTS, VOCABULARY = 4, 32


class Counting(LogitsProcessor):
    """A user's custom logits processor."""

    steps = 0

    def apply_staged_writes(self) -> None:
        self.steps += 1

    def apply(self, logits, ctx):
        return logits


@pytest.fixture
def sampler() -> Sampler:
    states = RequestState(REQUESTS, 64, 64, 3, VOCABULARY, DEVICE)
    config = SimpleNamespace(
        reasoning_config=None, model_config=SimpleNamespace(max_model_len=64)
    )
    own = [Counting(config, states)]
    sizes = REQUESTS, VOCABULARY, DEVICE, states
    return Sampler(config, *sizes, custom_logits_processors=own)


def on_device(sampler: Sampler) -> list[tuple[float, ...]]:
    """Temperature, top-k and repetition penalty by slot."""
    states = sampler.sampling_states
    known = states.temperature, states.top_k, sampler.penalties_state.repetition_penalty
    return list(zip(*(each.gpu.tolist() for each in known), strict=True))


def test_request_uses_its_own_sampling_parameters(sampler: Sampler):
    """Also in a slot that another request had, and in steps without new requests."""
    first = SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.5)
    for slot, params in ((1, first), (2, SamplingParams()), (1, SamplingParams())):
        sampler.add_request(slot, params)
        sampler.apply_staged_writes()
        for _ in range(3):
            k = params.top_k or VOCABULARY
            expected = params.temperature, k, params.repetition_penalty
            assert on_device(sampler)[slot] == pytest.approx(expected)
            sampler.apply_staged_writes()


def test_parameters_are_not_copied_in_other_steps(sampler: Sampler):
    """Custom logits processors are still called in every step."""
    sampler.add_request(0, SamplingParams())
    sampler.apply_staged_writes()
    copied = sampler.sampling_states.temperature.gpu
    sampler.apply_staged_writes()
    assert sampler.sampling_states.temperature.gpu is copied
    assert sampler.custom_logits_processors[0].steps == 2
