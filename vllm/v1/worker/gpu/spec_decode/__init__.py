# SPDX-License-Identifier: Apache-2.0
"""Seam on `vllm/v1/worker/gpu/spec_decode/__init__.py`.

Why: the base has one speculator per kind of drafter, and none for parallel ones.
How: draft models and EAGLE heads, parallel or not, get the unified speculator.
Upstream: "[Spec Decode] One speculator for draft models and EAGLE on Runner V2".
Until: upstream takes the unified speculator.
"""

import torch

from vllm._upstream import stand_on
from vllm.config import VllmConfig
from vllm.config.drafting import is_unified_method, why_not_unified
from vllm.logger import init_logger

upstream = stand_on(__name__)
logger = init_logger(__name__)


def init_speculator(vllm_config: VllmConfig, device: torch.device, req_states):
    """The speculator for a config; see the base's function of this name."""
    if is_unified_method(vllm_config):
        reason = why_not_unified(vllm_config)
        if reason is None:
            from vllm.v1.worker.gpu.spec_decode.unified import build_speculator

            return build_speculator(vllm_config, device)
        logger.warning(
            "Drafting falls back to the base's speculator: the unified one does not "
            "support %s. Turn that off to use it.",
            reason,
        )
    return upstream.init_speculator(vllm_config, device, req_states)
