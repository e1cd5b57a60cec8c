# SPDX-License-Identifier: Apache-2.0
"""Keys of speculators configs that are passed on to the draft model's config."""

import pytest

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
