# SPDX-License-Identifier: Apache-2.0
"""The families of drafters, a file each: how a draft model is loaded, what a pass is
fed, what it yields."""

from vllm.config import VllmConfig
from vllm.config.drafter.target import log_without_target
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from .draft_model import Drafter
from .eagle import EagleDrafter
from .pard2 import Pard2Drafter


def drafter_class(vllm_config: VllmConfig) -> type[Drafter]:
    """The family of a config whose drafter `is_unified`."""
    if _uses_target_features(vllm_config):
        return Pard2Drafter
    is_model = vllm_config.speculative_config.uses_draft_model()
    return Drafter if is_model else EagleDrafter


def _uses_target_features(vllm_config: VllmConfig) -> bool:
    """Whether a draft model is fed the target's hidden states.

    Logs one line if it should be, but the target cannot provide them.
    """
    spec = vllm_config.speculative_config
    features = spec.drafter.target_features
    if features is None:
        return False
    target = get_model_cls(vllm_config.model_config)
    if features.tapped and not supports_eagle3(target):
        why = f"{target.__name__} does not return auxiliary hidden states. Use a "
        log_without_target(spec.model, why + "target that EAGLE-3 supports")
        return False
    return True
