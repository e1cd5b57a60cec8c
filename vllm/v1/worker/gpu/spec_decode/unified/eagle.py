# SPDX-License-Identifier: Apache-2.0
"""Drafting from the target's hidden states: EAGLE, EAGLE-3 and P-EAGLE."""

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from .inputs import HiddenRows
from .speculator import UnifiedSpeculator


class EagleDrafter(UnifiedSpeculator):
    """Pairs the target's hidden state of a token with the token after it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        spec = vllm_config.speculative_config
        self.fed_hidden_size = spec.draft_model_config.get_hidden_size()
        super().__init__(vllm_config, device)
        # What mask slots are fed. Allocated here: what is allocated while weights
        # load is lost when an engine sleeps.
        self.mask_hidden = torch.zeros(
            self.fed_hidden_size, dtype=self.dtype, device=device
        )

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        return load_eagle_model(target_model, self.vllm_config)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self._refresh_mask_hidden()

    def set_attn(self, *args) -> None:
        super().set_attn(*args)
        self._refresh_mask_hidden()

    def _refresh_mask_hidden(self) -> None:
        """Projects the learned hidden state of a mask, once for all steps."""
        if self.layout.num_masks:
            if not hasattr(self.model, "mask_hidden"):
                raise ValueError(
                    f"{type(self.model).__name__} has no mask_hidden, which parallel "
                    "drafting feeds to mask slots: set parallel_drafting=false."
                )
            learned = self.model.mask_hidden.view(1, -1)
            self.mask_hidden.copy_(self._combined(learned).view(-1))

    def _combined(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.method != "eagle3":
            return hidden_states
        return self.model.combine_hidden_states(hidden_states)

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        rows = self._combined(torch.cat(aux, dim=-1)) if aux else last
        return HiddenRows(rows, self.mask_hidden)

    def fed_back(self, feedback: torch.Tensor, num_reqs: int) -> HiddenRows | None:
        count = num_reqs * self.layout.parallel_width
        rows = feedback[self.input_buffers.sample_rows[:count]]
        return HiddenRows(rows, self.mask_hidden)

    def model_inputs(self, num_tokens: int) -> dict[str, torch.Tensor | None]:
        buffers = self.input_buffers
        return {
            "input_ids": buffers.input_ids[:num_tokens],
            "positions": buffers.positions[:num_tokens],
            "hidden_states": buffers.hidden_states[:num_tokens],
            "inputs_embeds": None,
        }
