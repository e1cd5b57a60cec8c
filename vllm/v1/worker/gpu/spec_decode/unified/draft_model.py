# SPDX-License-Identifier: Apache-2.0
"""Drafting with a language model of its own: autoregressive, or in parallel (PARD)."""

import torch

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import (
    StandaloneARSpeculator,
)

from .inputs import HiddenRows
from .speculator import UnifiedSpeculator


class DraftModelDrafter(UnifiedSpeculator):
    """Feeds tokens alone; the drafter knows nothing of the target."""

    # Loaded as the base loads a draft model, by the drafter's own config.
    load_draft_model = StandaloneARSpeculator.load_draft_model

    @property
    def draft_vllm_config(self) -> VllmConfig:
        has_own_cache = self.speculative_config.kv_cache_dtype is not None
        return self._draft_vllm_config if has_own_cache else self.vllm_config

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        return None

    def fed_back(self, rows: torch.Tensor) -> HiddenRows | None:
        return None

    def model_inputs(
        self, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> dict[str, torch.Tensor | None]:
        buffers = self.input_buffers
        return {
            "input_ids": buffers.input_ids[:num_tokens],
            "positions": buffers.positions[:num_tokens],
        }
