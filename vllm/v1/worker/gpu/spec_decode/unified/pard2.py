# SPDX-License-Identifier: Apache-2.0
"""PARD-2: a draft model with the target's hidden states added to its embeddings.

PARD-2: arXiv 2605.08632; masks as in PARD, arXiv 2504.18583. A token takes the hidden
state of the preceding token, so that the one for the next token is already known;
`layout.py` says how states and slots are paired.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.config.drafter.target import BIAS, WEIGHT, load_warp, warp_here
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from .buffers import DraftBuffers
from .draft_model import load_draft_model
from .drafter import Drafter, ModelInputs
from .inputs import HiddenRows
from .kept_states import KeptStates
from .ranks import draft_ranks
from .structs import VerifiedBatch

logger = init_logger(__name__)


class Pard2Drafter(Drafter):
    """Feeds tokens, and the target's hidden states that `features` names, projected.

    States are projected before they are distributed to slots: there are fewer of them
    than slots, and kept states are narrower. H is the drafter's hidden size.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        super().__init__(vllm_config, device)
        self.features = self.speculative_config.drafter.target_features
        self.tapped_layers = self.features.tapped
        self.fed_hidden_size = self.draft_model_config.get_hidden_size()
        # Allocated here: memory allocated while weights load is lost when an engine
        # sleeps.
        warp = load_warp(warp_here(self.speculative_config))
        size = {"dtype": self.dtype, "device": device}
        self.weight = warp[WEIGHT].to(**size)  # [H, concatenated states]
        self.bias = warp[BIAS].to(**size) if BIAS in warp else None  # [H]
        self.kept: KeptStates | None = None
        self.kv_group = 0
        if vllm_config.kv_transfer_config is not None:
            logger.info(
                "KV that a connector loads comes without the target's hidden states. "
                "PARD-2 drafts without that of its last token; all others are computed "
                "here. Output is not affected."
            )

    def load(self, target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        self.ranks = draft_ranks(vllm_config)
        with self.ranks():
            self.model, self.cache_config_owner = load_draft_model(vllm_config)
        return self.model

    def set_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables, kv_group: int
    ) -> None:
        self.kv_group = kv_group
        no_state = self._projected(self.weight.new_zeros(self.weight.shape[1]))
        size = block_tables.block_sizes[kv_group]
        self.kept = KeptStates(kv_cache_config.num_blocks, size, no_state)
        logger.info(
            "States of the target kept for PARD-2 take %.3f GiB, beside the KV cache.",
            self.kept.nbytes / 2**30,
        )

    def _projected(self, states: torch.Tensor) -> torch.Tensor:
        return F.linear(states, self.weight, self.bias)

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows:
        states = dict(zip(self.tapped_layers, aux or (), strict=True))
        states[self.features.depth] = last
        fed = [states[layer] for layer in self.features.layers]
        rows = self._projected(torch.cat(fed, dim=-1))
        if self.kept is None:  # there are no KV blocks while memory is profiled
            return HiddenRows((rows,), rows)
        kept = self.kept
        return HiddenRows((rows,), kept.states, kept.positions, self.kv_group)

    def keep_states(
        self,
        verified: VerifiedBatch,
        hidden: HiddenRows | None,
        slot_mappings: torch.Tensor,
        *,
        is_launched: bool,
    ) -> None:
        slots, states = slot_mappings[self.kv_group], hidden.sources[0]
        self.kept.keep(verified, slots, states, ends=not is_launched)

    def model_inputs(
        self,
        buffers: DraftBuffers,
        num_tokens: int,
        is_first: bool,
        mode: CUDAGraphMode,
    ) -> ModelInputs:
        embeds = self.model.embed_input_ids(self.input_ids(buffers, num_tokens))
        fed = buffers.hidden_states(num_tokens, is_first)
        embeds = torch.add(embeds, fed, alpha=self.features.scale)
        if mode == CUDAGraphMode.PIECEWISE:
            embeds = buffers.at_lasting_address("inputs_embeds", embeds)
        return {
            "input_ids": None,
            "positions": buffers.positions(num_tokens),
            "inputs_embeds": embeds,
        }

    def to_feed(
        self, own: torch.Tensor, buffers: DraftBuffers, num_tokens: int, is_first: bool
    ) -> torch.Tensor:
        """Passes on what was fed: the target has no hidden states of drafts yet."""
        return buffers.hidden_states(num_tokens, is_first)

    def fed_back(self, rows: torch.Tensor) -> HiddenRows:
        return HiddenRows((rows,), self.kept.states)
