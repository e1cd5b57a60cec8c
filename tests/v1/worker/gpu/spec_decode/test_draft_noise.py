# SPDX-License-Identifier: Apache-2.0
"""Keys of random noise: new wherever samples must be independent of earlier ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.config.drafter import DrafterConfig
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.verification import (
    draw_alone,
    draw_seeded_alone,
    follow_chains,
    rejection_keys,
)

DEVICE = torch.device(current_platform.device_type)

MOST = 5


@pytest.fixture
def on_device():
    """Creates tensors on the device on which kernels run."""
    with DEVICE:
        yield


def test_samples_are_those_of_target_up_to_first_wrong_draft():
    """Four requests: all drafts right, second wrong, first invalid, and no drafts."""
    ends = torch.tensor([0, 4, 8, 11, 12], dtype=torch.int32, device=DEVICE)
    drawn = torch.arange(12, device=DEVICE)
    drafts = drawn.roll(1).int()
    drafts[4 + 2], drafts[8 + 1] = 99, -1
    tokens, count = follow_chains(drawn, drafts, ends, MOST)
    assert count.tolist() == [4, 2, 1, 1]
    for begin, found, number in zip(ends, tokens, count, strict=False):
        assert torch.equal(found[:number], drawn[begin : begin + number])


@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.usefixtures("on_device")
def test_seeded_drafts_from_target_distribution_are_accepted(is_unified: bool):
    """With the keys of each speculator, which differ."""
    torch.manual_seed(0)
    num_reqs, vocab, rows = 3, 40, MOST + 1
    logits = torch.randn(num_reqs * rows, vocab)
    states = torch.arange(num_reqs).repeat_interleave(rows)
    steps = torch.arange(rows, dtype=torch.int32).repeat(num_reqs)
    positions, is_draft = 20 + steps.long(), steps < MOST
    temperature, seeds = torch.ones(num_reqs), torch.arange(num_reqs) + 5
    keys, cache = positions[is_draft], torch.zeros(num_reqs, MOST, vocab)
    drafts = torch.full((num_reqs, rows), -1)
    drafts[:, 1:] = gumbel_sample(
        logits[is_draft], states[is_draft], temperature, seeds, keys,
        apply_temperature=True, is_drafting=not is_unified, logits_cache=cache,
        logits_cache_col=steps[is_draft],
    ).view(num_reqs, MOST)  # fmt: skip

    states_np = np.arange(num_reqs)
    sampler = object.__new__(RejectionSampler)
    sampler.drafter = DrafterConfig("eagle3", MOST, is_unified=is_unified)
    sampler.keeps_seeds = is_unified
    sampler.num_speculative_steps = MOST
    sampler.synthetic_conditional_rates = sampler.watermark_key = None
    sampler.use_block_verification = False
    sampler.fly_window_size = sampler.fly_entropy_threshold = 0
    sampler.fly_entropy_top_k = 0
    sampler.sampler = SimpleNamespace(
        apply_sampling_params=lambda logits, *_: logits,
        use_fp64_gumbel=False,
        sampling_states=SimpleNamespace(
            temperature=SimpleNamespace(gpu=temperature, np=temperature.cpu().numpy()),
            seeds=SimpleNamespace(gpu=seeds),
            seeds_set=np.ones(num_reqs, dtype=bool),
            any_explicit_seed=lambda _: True,
        ),
    )
    ends = torch.arange(num_reqs + 1, dtype=torch.int32) * rows
    flat = drafts.flatten().int()
    _, sampled, count = sampler._verify(
        logits, cache, flat, positions, ends, torch.arange(num_reqs), states_np,
        states, steps, states_np, flat,
    )  # fmt: skip
    assert count.tolist() == [rows] * num_reqs
    assert torch.equal(sampled[:, :MOST], drafts[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_batch_draws_as_in_a_mixed_one(dtype: torch.dtype):
    """Without noise, ties included."""
    logits = torch.randint(-3, 3, (6, 3000), device=DEVICE).to(dtype)
    states = torch.tensor([0, 0, 0, 2, 2, 2], device=DEVICE)
    temperature = torch.tensor([0.0, 1.0, 0.0])
    known = SimpleNamespace(
        temperature=SimpleNamespace(gpu=temperature.to(DEVICE), np=temperature.numpy()),
        seeds=SimpleNamespace(gpu=torch.arange(3, device=DEVICE)),
    )
    sampler = SimpleNamespace(sampling_states=known, use_fp64_gumbel=False)
    positions = torch.arange(6, device=DEVICE)
    greedy, mixed = (
        draw_alone(sampler, logits, states, np.array(batch), positions)
        for batch in ([0, 2], [0, 1, 2])
    )
    assert greedy.tolist() == mixed.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("window, temperature", [(2, 1.0), (0, 0.0)])
def test_lossy_and_greedy_verification_ignores_seeds(window: int, temperature: float):
    """`fly` accepts what the target would not sample; regression: for a first greedy
    request with a seed kernels were compiled that no warm-up run needs."""
    known = SimpleNamespace(
        any_explicit_seed=lambda _: True,
        temperature=SimpleNamespace(np=np.full(3, temperature)),
    )
    sampler = SimpleNamespace(
        keeps_seeds=True,
        synthetic_conditional_rates=None,
        watermark_key=None,
        fly_window_size=window,
        sampler=SimpleNamespace(sampling_states=known),
    )
    sampled, count, states = torch.tensor([[1, 2]]), torch.tensor([2]), np.array([1])
    found = draw_seeded_alone(sampler, *[None] * 5, states, sampled, count)
    assert found[0] is sampled and found[1] is count


@pytest.mark.parametrize("is_unified", [True, False])
@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("is_sampled", [True, False])
def test_verification_has_noise_of_its_own(is_unified, block, is_sampled):
    """Where drafts are sampled with the target's; vLLM's keys serve everything else."""
    drafter = DrafterConfig("eagle3", MOST, is_unified=is_unified)
    sampler = SimpleNamespace(drafter=drafter, use_block_verification=block)
    positions = torch.tensor([0, 7, 131071])
    keys = rejection_keys(sampler, torch.empty(1) if is_sampled else None, positions)
    apart = is_unified and is_sampled and not block
    assert torch.equal(keys, positions) != apart
    assert set(keys.tolist()).isdisjoint(range(131072)) == apart
