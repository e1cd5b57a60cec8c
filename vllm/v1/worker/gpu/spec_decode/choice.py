# SPDX-License-Identifier: Apache-2.0
"""Which configs the unified speculator drafts for."""

from typing import TYPE_CHECKING

import torch

from vllm.config.drafting import is_unified_method, why_not_unified
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.spec_decode.unified.speculator import UnifiedSpeculator

logger = init_logger(__name__)


def unified_speculator(
    vllm_config: "VllmConfig", device: torch.device
) -> "UnifiedSpeculator | None":
    """The unified speculator; None where one of vLLM's drafts, with a line of why."""
    if not is_unified_method(vllm_config):
        return None
    reason = why_not_unified(vllm_config)
    if reason is None:
        from vllm.v1.worker.gpu.spec_decode.unified import build_speculator

        return build_speculator(vllm_config, device)
    logger.warning(
        "Drafting falls back to vLLM's speculator: the unified one does not support "
        "%s. Turn that off to use it.",
        reason,
    )
    return None
