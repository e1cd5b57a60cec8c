# SPDX-License-Identifier: Apache-2.0
"""What an acceptance estimator has learned outlasts the memory of the weights."""

from unittest.mock import Mock

import torch

from vllm.v1.worker.gpu.spec_decode import speculator
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import (
    OnlineAcceptanceEstimator,
)


def test_estimator_outlasts_memory_of_weights(monkeypatch):
    """`set_attn` is called while the KV cache is initialized.

    Other objects refer to the estimator's tensors before that.
    """
    estimator = OnlineAcceptanceEstimator(4, 3, torch.device("cpu"))
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
