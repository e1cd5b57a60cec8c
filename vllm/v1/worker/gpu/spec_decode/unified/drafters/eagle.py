# SPDX-License-Identifier: Apache-2.0
"""Drafting from the target's hidden states: EAGLE, EAGLE-3, P-EAGLE, MTP modules.

EAGLE: arXiv 2401.15077. EAGLE-3, from several of the target's layers: arXiv 2503.01840.
P-EAGLE, parallel, with a learned hidden state at masks: vLLM's blog of 2026-03-13, vLLM
PR #32887. A single MTP module is run as an EAGLE head: arXiv 2412.19437.
"""

from copy import copy

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.files import takes_aux_hidden_states
from vllm.model_executor.models import supports_multimodal_embeddings
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

from ..input_kernel import HiddenRows
from ..inputs import DraftInputs
from ..sampler import OwnVocabulary
from .draft_model import Drafter, ModelInputs


class EagleDrafter(Drafter):
    """Pairs the target's hidden state of a token with the token after it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.is_eagle3 = self.speculative_config.method == "eagle3"
        self.is_mtp = self.speculative_config.method == "mtp"
        # The runner collects states of layers for every EAGLE-3 head, even for one that
        # takes the last one's.
        self.takes_aux_hidden_states = self.is_eagle3 and takes_aux_hidden_states(
            self.draft_model_config.hf_config
        )
        self.fed_hidden_size = self.draft_model_config.get_hidden_size()
        # A head that was trained on M-RoPE positions needs a target that has them. vLLM
        # compiles EAGLE-1 heads for plain positions.
        if self.is_eagle3 and vllm_config.model_config.uses_mrope:
            self.rope_dims = self.draft_model_config.mrope_num_dims
        # Hidden states of mask slots: in the first pass in the format of the target's,
        # [S * H], set on the first batch; in later passes in that of the drafter's own.
        # Allocated here: memory allocated while weights load is lost when an engine
        # sleeps.
        self.target_mask: torch.Tensor | None = None
        self.own_mask = torch.zeros(
            self.fed_hidden_size, dtype=self.dtype, device=device
        )

    def load(self, target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        config = _quantized(vllm_config) if self.is_mtp else vllm_config
        self.model = load_eagle_model(target_model, config)
        self.cache_config_owner = vllm_config
        self.takes_embeddings = (
            supports_multimodal_embeddings(self.model)
            and vllm_config.model_config.supports_multimodal_inputs
        )
        if self.layout.num_masks and not hasattr(self.model, "mask_hidden"):
            raise ValueError(
                f"{type(self.model).__name__} has no mask_hidden, which parallel "
                "drafting feeds to mask slots: set parallel_drafting=false."
            )
        if not self.is_probabilistic:
            self.vocabulary = OwnVocabulary.of_head(self.model) or self.vocabulary
        self.refresh()
        return self.model

    def refresh(self) -> None:
        """Projects the learned hidden state of a mask, once for all steps."""
        if self.layout.num_masks and self.layout.num_passes > 1:
            learned = self.model.mask_hidden.view(1, -1)
            self.own_mask.copy_(self._combined(learned).view(-1))

    def _combined(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.is_eagle3:
            return hidden_states
        return self.model.combine_hidden_states(hidden_states)

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows:
        sources = tuple(aux) if aux and self.takes_aux_hidden_states else (last,)
        if self.target_mask is None:
            size = sum(rows.shape[1] for rows in sources)
            self.target_mask = (
                self.model.mask_hidden.view(-1)
                if self.layout.num_masks
                else sources[0].new_zeros(size)
            )
        return HiddenRows(sources, self.target_mask)

    def feed_back(self, rows: torch.Tensor) -> HiddenRows:
        return HiddenRows((rows,), self.own_mask)

    def model_inputs(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> ModelInputs:
        hidden_states = inputs.hidden_states(num_tokens, is_first)
        if is_first:
            # Combined only now: the input kernel reads the target's rows in place, and
            # writes them once.
            hidden_states = self._combined(hidden_states)
        takes = self.takes_embeddings
        embeds = self._embeddings(inputs, num_tokens, is_first) if takes else None
        if mode == CUDAGraphMode.PIECEWISE:
            lasting = inputs.at_lasting_address
            hidden_states = lasting("hidden_states", hidden_states)
            embeds = None if embeds is None else lasting("inputs_embeds", embeds)
        return {
            "input_ids": inputs.batch.input_ids[:num_tokens],
            "positions": inputs.positions(num_tokens),
            "hidden_states": hidden_states,
            "inputs_embeds": embeds,
        }

    def _embeddings(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool
    ) -> torch.Tensor:
        """[num_tokens, H], the head's own for tokens, the target's for images."""
        ids = inputs.batch.input_ids[:num_tokens]
        if not is_first or inputs.multimodal is None:
            return self.model.embed_input_ids(ids)
        embeds, rows = inputs.multimodal
        # On the CPU: counting them on the device would need a synchronization.
        is_multimodal = torch.zeros(num_tokens, dtype=torch.bool)
        is_multimodal[rows] = True
        return self.model.embed_input_ids(
            ids, multimodal_embeddings=embeds, is_multimodal=is_multimodal
        )


def _quantized(vllm_config: VllmConfig) -> VllmConfig:
    """The config with the quantization that the user sets for an MTP module. vLLM
    quantizes one as the target is."""
    spec, target = vllm_config.speculative_config, vllm_config.model_config
    if spec.quantization in (None, target.quantization):
        return vllm_config
    own = copy(vllm_config)
    own.quant_config = get_draft_quant_config(vllm_config)
    return own
