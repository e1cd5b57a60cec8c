# SPDX-License-Identifier: Apache-2.0
"""How soon the estimator adapts to a drafter that is better than its confidence."""

from unittest.mock import Mock

import pytest
import torch

from vllm.v1.worker.gpu.spec_decode import speculator
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)
from vllm.v1.worker.gpu.spec_decode.trimming import QuickEstimator

from .batches import DEVICE

N, K = 16, 3
ACCEPTED = 0.85


@pytest.fixture
def estimator() -> QuickEstimator:
    found = QuickEstimator(N, K, DEVICE)
    found.predictions.fill_(torch.sigmoid(found.intercepts[0]))  # features of 0
    return found


def grade(
    estimator: OnlineAcceptanceEstimator, seed: int, rate: float = ACCEPTED
) -> None:
    """Observes a step's drafts, then predicts the next ones."""
    chances = torch.rand(N, K, generator=torch.Generator().manual_seed(seed))
    accepted = (chances < rate).int().cumprod(1).sum(1).int().to(DEVICE)
    states = torch.arange(N, dtype=torch.int32, device=DEVICE)
    estimator.step(states, accepted + 1, K - accepted)
    estimator.predictions.copy_(torch.sigmoid(estimator.intercepts).expand(N, K))


def test_predictions_are_right_after_a_few_steps(estimator):
    assert estimator.predictions.mean() < 0.5
    for seed in range(14):
        grade(estimator, seed)
    assert estimator.predictions.mean().item() == pytest.approx(ACCEPTED, abs=0.08)


def test_refit_interval_grows_to_that_of_vllm(estimator):
    refits = []
    for seed in range(400):
        grade(estimator, seed)
        refits.append(estimator._refits)
    assert [refits[n] for n in (0, 1, 5, 13)] == [0, 1, 2, 3]
    assert refits[399] - refits[199] == 2


def test_adapts_after_long_full_acceptance(estimator):
    """Regression: vLLM's intercepts fell to minus some hundred thousand and stayed."""
    for seed in range(600):
        grade(estimator, seed, rate=1.0)
    assert estimator.predictions.min() > 0.95
    for seed in range(400):
        grade(estimator, seed, rate=0.5)
    assert estimator.predictions[0].tolist() == pytest.approx([0.5] * K, abs=0.1)


def test_forget_restores_initial_state(estimator):
    fresh = QuickEstimator(N, K, DEVICE)
    tensors = ("slope", "intercepts", "features", "predictions", "info", "counts")
    places = [getattr(estimator, name).data_ptr() for name in tensors]
    for seed in range(9):
        grade(estimator, seed)
    estimator.forget()
    for name in tensors:
        assert torch.equal(getattr(estimator, name), getattr(fresh, name))
    assert [getattr(estimator, name).data_ptr() for name in tensors] == places
    assert estimator._refits == 0


def test_estimator_outlasts_memory_of_weights(estimator, monkeypatch):
    """`set_attn` is called while the KV cache is initialized.

    Other objects refer to the estimator's tensors before that.
    """
    estimator.slope.fill_(0.75)
    found = vars(estimator).items()
    tensors = {name: one for name, one in found if isinstance(one, torch.Tensor)}
    assert len(tensors) == 7
    loaded = [tensor.detach() for tensor in tensors.values()]  # their memory
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    groups = Mock(return_value=([], None, None))
    monkeypatch.setattr(speculator, "init_attn_backend", groups)
    owner = Mock(acceptance_estimator=estimator)
    speculator.DraftModelSpeculator.set_attn(owner, *[Mock()] * 5)
    for tensor in loaded:  # as sleep of level 2 does
        tensor.fill_(float("nan"))
    for name, tensor in tensors.items():
        assert getattr(estimator, name) is tensor
        assert torch.equal(tensor, before[name])
