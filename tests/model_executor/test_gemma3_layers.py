# SPDX-License-Identifier: Apache-2.0
"""Auxiliary hidden states of Gemma 3's layers, for EAGLE-3 heads."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from vllm.model_executor.models import gemma3
from vllm.model_executor.models.interfaces import supports_eagle3

ROWS, DEPTH = 3, 4


class AddOne(nn.Module):
    """A layer that adds one to each state, half of it in the residual."""

    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = torch.zeros_like(hidden_states)
        return hidden_states + 0.5, residual + 0.5


class Sum(nn.Module):
    """Replaces the final norm."""

    def forward(self, hidden_states, residual):
        return hidden_states + residual, residual


@pytest.fixture
def model(monkeypatch) -> nn.Module:
    only = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(gemma3, "get_pp_group", lambda: only)
    model = gemma3.Gemma3Model.__new__(gemma3.Gemma3Model)
    nn.Module.__init__(model)
    model.start_layer, model.end_layer, model.do_not_compile = 0, DEPTH, True
    model.layers = nn.ModuleList(AddOne() for _ in range(DEPTH))
    model.norm = Sum()
    return model


@pytest.mark.parametrize("layers", [(0, 2, DEPTH), (1,)])
def test_aux_hidden_states(model: nn.Module, layers: tuple[int, ...]):
    """The input of layer i, after i layers."""
    model._set_aux_hidden_state_layers(layers)
    last, found = model(None, torch.arange(ROWS), None, torch.zeros(ROWS, 8))
    assert last.unique().tolist() == [DEPTH]
    assert [states.unique().tolist() for states in found] == [[i] for i in layers]


def test_without_aux_layers(model: nn.Module):
    last = model(None, torch.arange(ROWS), None, torch.zeros(ROWS, 8))
    assert last.shape == (ROWS, 8)


def test_supports_eagle3():
    assert supports_eagle3(gemma3.Gemma3ForCausalLM)
