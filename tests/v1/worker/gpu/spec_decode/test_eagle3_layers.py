# SPDX-License-Identifier: Apache-2.0
"""Each layer's states reach the columns of `fc` that a head's file lists for it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.v1.worker.gpu.spec_decode.tapped_layers import check_tapped, in_listed_order


def spec_config(**hf_config):
    draft = SimpleNamespace(hf_config=SimpleNamespace(**hf_config))
    return SimpleNamespace(draft_model_config=draft, method="eagle3", model="head")


STATES = [torch.full((2, 4), layer) for layer in (0, 3, 5)]  # as the target returns


@pytest.mark.parametrize(
    "hf_config, order",
    [
        ({"eagle_aux_hidden_state_layer_ids": [5, 0, 3]}, (5, 0, 3)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 5, 0]}}, (3, 5, 0)),
        # Their ids name the layer whose output is tapped.
        ({"dflash_config": {"target_layer_ids": [4, -1, 2]}}, (5, 0, 3)),
        ({"target_layer_ids": [2, 4, -1]}, (3, 5, 0)),
        ({}, (0, 3, 5)),
    ],
)
def test_states_are_in_the_order_of_the_file(hf_config: dict, order: tuple):
    config = spec_config(**hf_config)
    found = in_listed_order(STATES, config)
    assert [int(states[0, 0]) for states in found] == list(order)
    config.method = "extract_hidden_states"  # keeps those of vLLM
    assert in_listed_order(STATES, config) is STATES
    assert in_listed_order(None, config) is None


def test_missing_states_are_refused():
    config = spec_config(eagle_aux_hidden_state_layer_ids=[0, 1, 3, 5])
    with pytest.raises(ValueError, match=r"head is fed layers \[0, 1, 3, 5\] .* 3:"):
        in_listed_order(STATES, config)


class Decoder(nn.Module):
    pass


class TappedDecoder(nn.Module, EagleModelMixin):
    pass


def test_layer_0_needs_common_code():
    """E.g. vLLM's DeepSeek-V3 adds its residual, which is None; its Transformers
    backend counts from the end."""
    target = nn.Module()
    assert check_tapped(target, [5, 0, 3], "head", TappedDecoder()) == (0, 3, 5)
    assert check_tapped(target, [5, 1], "head", Decoder()) == (1, 5)
    for decoder in (Decoder(), None):
        with pytest.raises(ValueError, match=r"is fed layer 0 .* Module does not"):
            check_tapped(target, [5, 0, 3], "head", decoder)


def test_layer_0_is_a_copy():
    """Regression: later layers update the embeddings in place, as the residual."""
    decoder, embeddings = TappedDecoder(), torch.ones(2, 4)
    decoder.aux_hidden_state_layers = (0, 1)
    kept = decoder._maybe_add_hidden_state([], 0, embeddings, None)
    kept = decoder._maybe_add_hidden_state(kept, 1, embeddings, embeddings.clone())
    embeddings.add_(7)
    assert [int(states[0, 0]) for states in kept] == [1, 2]
