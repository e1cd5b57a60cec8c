# SPDX-License-Identifier: Apache-2.0
"""One speculator for every kind of draft model, on Model Runner V2.

`layout.py` says which slots a draft batch has, `inputs.py` writes them in one launch,
`speculator.py` runs the passes, `draft_model.py` and `eagle.py` say how a drafter is
loaded and what it is fed.
"""

import torch

from vllm.config import VllmConfig

from .speculator import UnifiedSpeculator


def build_speculator(
    vllm_config: VllmConfig, device: torch.device
) -> UnifiedSpeculator:
    """The speculator for a config that `config.drafting.why_not_unified` accepts."""
    if vllm_config.speculative_config.uses_draft_model():
        from .draft_model import DraftModelDrafter

        return DraftModelDrafter(vllm_config, device)
    from .eagle import EagleDrafter

    return EagleDrafter(vllm_config, device)
