# SPDX-License-Identifier: Apache-2.0
"""One speculator for every kind of draft model, on Model Runner V2.

`speculator.py` runs a draft step: prepare inputs, run one or more passes, sample.
`layout.py` defines the slots of a draft batch, `inputs.py` writes them in one launch.
`draft_model.py`, `pard2.py` and `eagle.py` define how a draft model is loaded and what
its inputs are.
"""

import torch

from vllm.config import VllmConfig
from vllm.config.drafter.target import say_without_target
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from .draft_model import DraftModelDrafter
from .drafter import Drafter
from .eagle import EagleDrafter
from .pard2 import Pard2Drafter
from .speculator import UnifiedSpeculator


def build_speculator(
    vllm_config: VllmConfig, device: torch.device
) -> UnifiedSpeculator:
    """The speculator for a config whose drafter `is_unified`."""
    drafter = _kind_of_drafter(vllm_config)(vllm_config, device)
    return UnifiedSpeculator(vllm_config, device, drafter)


def _kind_of_drafter(vllm_config: VllmConfig) -> type[Drafter]:
    if _is_fed_and_can_be(vllm_config):
        return Pard2Drafter
    if vllm_config.speculative_config.uses_draft_model():
        return DraftModelDrafter
    return EagleDrafter


def _is_fed_and_can_be(vllm_config: VllmConfig) -> bool:
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
        say_without_target(spec.model, why + "target that EAGLE-3 supports")
        return False
    return True
