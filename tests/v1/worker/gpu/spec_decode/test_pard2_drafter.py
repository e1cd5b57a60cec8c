# SPDX-License-Identifier: Apache-2.0
"""Which targets can feed a PARD-2 drafter; `tests/v1/e2e` tests what it is fed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.nn as nn

from vllm.config.drafter import DrafterConfig, TargetFeatures
from vllm.v1.worker.gpu.spec_decode.unified import drafters


class Opaque(nn.Module):
    """A target that does not provide auxiliary hidden states."""


@pytest.mark.parametrize("layers, is_fed", [((6, 2), False), ((6,), True)])
def test_target_without_aux_hidden_states(
    layers: tuple[int, ...], is_fed: bool, monkeypatch, caplog_vllm
):
    """Only its last hidden states can be used."""
    monkeypatch.setattr(drafters, "get_model_cls", lambda config: Opaque)
    features = TargetFeatures(layers, 6, 1.0, Path())
    drafter = DrafterConfig("draft_model", 1, target_features=features)
    spec = SimpleNamespace(drafter=drafter, model="some/drafter")
    config = SimpleNamespace(speculative_config=spec, model_config=None)
    assert drafters._uses_target_features(config) is is_fed
    assert ("Opaque does not return" in caplog_vllm.text) is not is_fed
