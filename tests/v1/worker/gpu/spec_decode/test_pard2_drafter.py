# SPDX-License-Identifier: Apache-2.0
"""What a PARD-2 drafter is fed of the target's hidden states."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from vllm.config.drafter import DrafterConfig
from vllm.config.drafter.drafter import TargetFeatures
from vllm.v1.worker.gpu.spec_decode import unified
from vllm.v1.worker.gpu.spec_decode.unified.pard2 import Pard2Drafter

DEPTH, WIDTH = 6, 2


def drafter(layers: tuple[int, ...]) -> Pard2Drafter:
    """A drafter as far as feeding it needs one; its projection adds layers up."""
    made = Pard2Drafter.__new__(Pard2Drafter)
    made.features = TargetFeatures(layers, DEPTH, 1.0, Path())
    made.tapped_layers = made.features.tapped
    parts = [torch.eye(WIDTH) * 10**i for i in range(len(layers))]
    made.weight, made.bias = torch.cat(parts, dim=1), None
    made.kept = None
    return made


def states(value: float) -> torch.Tensor:
    return torch.full((3, WIDTH), value)


@pytest.mark.parametrize("layers", [(6, 5, 2), (2, 5, 6), (6,), (2, 2)])
def test_states_are_in_listed_order(layers: tuple[int, ...]):
    """The target hands them out by ascending layer; its output is the last one's."""
    value = {2: 6.0, 5: 4.0, 6: 2.0}
    made = drafter(layers)
    aux = [states(value[layer]) for layer in made.tapped_layers]
    (rows,) = made.target_hidden(states(value[6]), aux or None).sources
    wanted = sum(value[layer] * 10**i for i, layer in enumerate(layers))
    assert torch.equal(rows, states(wanted))


class Opaque(nn.Module):
    """A target that does not hand out what is between its layers."""


@pytest.mark.parametrize("layers, is_fed", [((6, 2), False), ((6,), True)])
def test_target_that_cannot_be_tapped(
    layers: tuple[int, ...], is_fed: bool, monkeypatch, caplog_vllm
):
    """Its output is there all the same."""
    monkeypatch.setattr(unified, "get_model_cls", lambda config: Opaque)
    features = TargetFeatures(layers, DEPTH, 1.0, Path())
    drafter = DrafterConfig("draft_model", 1, target_features=features)
    spec = SimpleNamespace(drafter=drafter, model="some/drafter")
    config = SimpleNamespace(speculative_config=spec, model_config=None)
    assert unified._is_fed_and_can_be(config) is is_fed
    assert ("Opaque does not hand out" in caplog_vllm.text) is not is_fed
