# SPDX-License-Identifier: Apache-2.0
"""What one kind of draft model brings to a draft step.

A new kind is one file: a subclass of `Drafter`, chosen in `build_speculator`.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from .buffers import DraftBuffers
from .draft_config import draft_layout
from .inputs import HiddenRows
from .structs import VerifiedBatch
from .vocabulary import DraftVocabulary

ModelInputs = dict[str, torch.Tensor | None]


class Drafter(ABC):
    """How a draft model is loaded, and what it is fed.

    Attributes:
        layout: the slots of the most drafts that a step may ask for.
        model: the draft model, once it is loaded.
        cache_config_owner: the config that it was loaded with, as to its KV cache.
        fed_hidden_size: width of the hidden states that a later pass is fed; None if
            it takes none.
        tapped_layers: layers whose states the target is to hand out beside its output.
        vocabulary: of a draft model whose tokens are not the target's.
        takes_embeddings: whether it is fed the target's embeddings of images and the
            like; else it is fed the tokens that stand for them.
        rope_dims: dimensions of the M-RoPE positions that it is fed; 0 for plain ones.
    """

    model: nn.Module
    cache_config_owner: VllmConfig
    fed_hidden_size: int | None = None
    tapped_layers: tuple[int, ...] = ()
    vocabulary: DraftVocabulary | None = None
    takes_embeddings: bool = False
    rope_dims: int = 0

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.device = device
        self.dtype = vllm_config.model_config.dtype
        self.speculative_config = vllm_config.speculative_config
        self.draft_model_config = self.speculative_config.draft_model_config
        self.layout = draft_layout(vllm_config)
        drafter = self.speculative_config.drafter
        if (mapping := drafter.vocabulary) is not None:
            self.vocabulary = DraftVocabulary(mapping, drafter.mask_token_id, device)

    @abstractmethod
    def load(self, target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        """Loads the draft model into `model`, and returns it.

        Args:
            target_model: what it may share weights with.
            vllm_config: the engine's, widened for draft batches.

        Raises:
            ValueError: the model lacks what the layout needs.
        """

    def refresh(self) -> None:
        """Called when the model's weights were loaded again, where they were."""
        return None

    def set_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables, kv_group: int
    ) -> None:
        """Called when the KV cache is known.

        Args:
            kv_cache_config: of all KV groups.
            block_tables: the target's.
            kv_group: the first one with layers of the draft model.
        """
        return None

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        """What the first pass is fed of the target's hidden states.

        Args:
            last: [num_tokens, H], the target's output.
            aux: [num_tokens, H] each, of the tapped layers, by ascending layer.
        """
        return None

    def keep_states(
        self,
        verified: VerifiedBatch,
        hidden: HiddenRows | None,
        slot_mappings: torch.Tensor,
        *,
        is_launched: bool,
    ) -> None:
        """Keeps what later steps are fed; called twice a step, around its first pass.

        Args:
            hidden: what `target_hidden` returned.
            slot_mappings: [G, at least num_tokens] int64, KV slots of the verified
                batch.
            is_launched: false before the pass is laid out, true once it is launched.
        """
        return None

    def input_ids(self, buffers: DraftBuffers, num_tokens: int) -> torch.Tensor:
        """[num_tokens] int32, the drafter's own ids of the tokens of a pass."""
        ids = buffers.batch.input_ids[:num_tokens]
        return ids if self.vocabulary is None else self.vocabulary.input_ids(ids)

    @abstractmethod
    def model_inputs(
        self,
        buffers: DraftBuffers,
        num_tokens: int,
        is_first: bool,
        mode: CUDAGraphMode,
    ) -> ModelInputs:
        """The model's arguments, from the buffers."""

    def to_feed(
        self, own: torch.Tensor, buffers: DraftBuffers, num_tokens: int, is_first: bool
    ) -> torch.Tensor:
        """[num_tokens, H], the states that a pass hands on to the next one.

        Args:
            own: [num_tokens, H], what the model returned.
        """
        return own

    def fed_back(self, rows: torch.Tensor) -> HiddenRows | None:
        """What a later pass is fed of the states that were handed on.

        Args:
            rows: [num_reqs * W, H], those of the slots that were sampled.
        """
        return None


def refresh_drafter(runner: Any) -> None:
    """Called when a model runner's draft model was sent other weights.

    Args:
        runner: of either version; one of vLLM's own speculators may draft.
    """
    drafter = getattr(getattr(runner, "speculator", None), "drafter", None)
    if isinstance(drafter, Drafter):
        drafter.refresh()
