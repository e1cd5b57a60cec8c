# SPDX-License-Identifier: Apache-2.0
"""One speculator for every kind of draft model, on Model Runner V2.

`layout.py` says which slots a draft batch has, `inputs.py` writes them in one launch,
`speculator.py` runs the passes, `draft_model.py`, `pard2.py` and `eagle.py` say how a
drafter is loaded and what it is fed.
"""

import torch

from vllm.config import VllmConfig
from vllm.config.draft_features import draft_without_target
from vllm.model_executor.model_loader import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from .speculator import UnifiedSpeculator


def build_speculator(
    vllm_config: VllmConfig, device: torch.device
) -> UnifiedSpeculator:
    """The speculator for a config that `config.drafting.why_not_unified` accepts."""
    if _is_fed_and_can_be(vllm_config):
        from .pard2 import Pard2Drafter

        return Pard2Drafter(vllm_config, device)
    if vllm_config.speculative_config.uses_draft_model():
        from .draft_model import DraftModelDrafter

        return DraftModelDrafter(vllm_config, device)
    from .eagle import EagleDrafter

    return EagleDrafter(vllm_config, device)


def _is_fed_and_can_be(vllm_config: VllmConfig) -> bool:
    """Whether a draft model is fed the target's states; one line if it cannot be."""
    spec = vllm_config.speculative_config
    features = getattr(spec, "target_features", None)
    if features is None:
        return False
    target = get_model_cls(vllm_config.model_config)
    if features.tapped and not supports_eagle3(target):
        why = f"{target.__name__} does not hand out what is between its layers. Use a "
        draft_without_target(spec, why + "target that EAGLE-3 supports")
        return False
    return True
