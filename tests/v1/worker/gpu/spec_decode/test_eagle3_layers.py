# SPDX-License-Identifier: Apache-2.0
"""Layer ids of an EAGLE-3 head are read from all config keys of real checkpoints."""

from types import SimpleNamespace

import pytest

from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils


def spec_config(**hf_config):
    draft = SimpleNamespace(hf_config=SimpleNamespace(**hf_config))
    return SimpleNamespace(draft_model_config=draft)


@pytest.mark.parametrize(
    "hf_config, expected",
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, (2, 5, 9)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]}},
            (1, 17, 33),
        ),
        ({"eagle_config": {"layer_ids": [3, 4]}}, (3, 4)),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [7]},
            },
            (2,),
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, None),
        ({"eagle_config": None}, None),
        ({}, None),
    ],
)
def test_aux_layer_ids(hf_config: dict, expected: tuple | None):
    ids = eagle3_utils.get_eagle3_aux_layers_from_config(spec_config(**hf_config))
    assert ids == expected
