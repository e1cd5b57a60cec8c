# SPDX-License-Identifier: Apache-2.0
"""Keys of speculators configs that are passed on to the draft model's config."""

import pytest
from transformers import Qwen3Config

from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.transformers_utils.configs.speculators.algos import (
    SUPPORTED_SPECULATORS_TYPES,
)


@pytest.mark.parametrize("said", [True, False, None])
@pytest.mark.parametrize("key", ["fc_norm", "norm_output", "norm_before_fc"])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_norms_of_a_head_are_kept(kind: str, key: str, said: bool | None):
    """A key that is missing means no norm."""
    config = {"mask_token_id": 2, "draft_vocab_size": 32, "target_hidden_size": 8}
    config |= {} if said is None else {key: said}
    made: dict = {"model_type": "llama"}
    SUPPORTED_SPECULATORS_TYPES[kind](config_dict=config, pre_trained_config=made)
    assert made[key] is bool(said)


@pytest.mark.parametrize("flag, causal", [(False, [True, False]), (True, [False] * 2)])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_only_sliding_layers_are_causal(kind: str, flag: bool, causal: list[bool]):
    """The trainer's flag is not of layers with full attention."""
    config = {"mask_token_id": 2, "aux_hidden_state_layer_ids": [1, 2]}
    config |= {"draft_vocab_size": 32, "sliding_window_non_causal": flag}
    layers = ["sliding_attention", "full_attention"]
    made: dict = {"model_type": "qwen3", "layer_types": layers, "num_hidden_layers": 2}
    SUPPORTED_SPECULATORS_TYPES[kind](config_dict=config, pre_trained_config=made)
    found = [_dflash_layer_causal(Qwen3Config(**made), layer) for layer in (0, 1)]
    assert found == causal
