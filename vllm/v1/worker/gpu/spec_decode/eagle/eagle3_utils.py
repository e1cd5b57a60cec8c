# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`.

Why: SpecForge- and NVIDIA-style heads keep the ids of the layers they tap in
    `eagle_config.eagle_aux_hidden_state_layer_ids`; the base's Runner V2 does not
    look there and taps its default layers without a word.
How: that place is read too, where the base finds no ids.
Upstream: "[Bugfix] Runner V2 reads eagle_config.eagle_aux_hidden_state_layer_ids".
Until: upstream reads it.
"""

from vllm._upstream import stand_on
from vllm.config import SpeculativeConfig
from vllm.config.draft_families import tapped_layers

upstream = stand_on(__name__)
_get_ids = upstream.get_eagle3_aux_layers_from_config


def get_eagle3_aux_layers_from_config(
    spec_config: SpeculativeConfig,
) -> tuple[int, ...] | None:
    """Ids of the tapped layers; None if the checkpoint leaves them to the model."""
    found = _get_ids(spec_config)
    if found or not (spec_config and spec_config.draft_model_config):
        return found
    return tapped_layers(spec_config.draft_model_config.hf_config)


upstream.get_eagle3_aux_layers_from_config = get_eagle3_aux_layers_from_config
