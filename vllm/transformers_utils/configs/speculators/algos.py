# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/transformers_utils/configs/speculators/algos.py`.

Why: of a P-EAGLE checkpoint of speculators the base drops `fc_norm` and `norm_output`,
    which it keeps of an EAGLE-3 one; such a head then drafts garbage, or fails to load.
How: both are taken over.
Upstream: "[Bugfix] Keep fc_norm and norm_output of speculators' P-EAGLE".
Until: upstream keeps them.
"""

from vllm._upstream import stand_on

upstream = stand_on(__name__)
_update_peagle = upstream.update_peagle


def update_peagle(config_dict: dict, pre_trained_config: dict) -> None:
    """Turns a P-EAGLE config of speculators into a transformers one, in place."""
    _update_peagle(config_dict, pre_trained_config)
    for key in ("fc_norm", "norm_output"):
        pre_trained_config[key] = config_dict.get(key, False)


upstream.update_peagle = update_peagle
upstream.SUPPORTED_SPECULATORS_TYPES["peagle"] = update_peagle
