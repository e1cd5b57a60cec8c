# SPDX-License-Identifier: Apache-2.0
"""What one kind of draft model brings to a draft step.

A new kind is one file: a subclass of `Drafter`, chosen in `build_speculator`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from .buffers import DraftBuffers
from .draft_config import draft_layout
from .fp8_head import refresh_lm_head
from .inputs import HiddenRows
from .structs import VerifiedBatch
from .vocabulary import MappedVocabulary, SpreadVocabulary, Vocabulary

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
        vocabulary: the tokens that the model's logits are of.
        mask_token_id: what mask slots hold.
        is_probabilistic: whether drafts are verified against the logits that they were
            drawn from, which are then by the target's ids.
        takes_embeddings: whether it is fed the target's embeddings of images and the
            like; else it is fed the tokens that stand for them.
        rope_dims: dimensions of the M-RoPE positions that it is fed; 0 for plain ones.
        ranks: what the draft model runs in, as it was built.
    """

    model: nn.Module
    cache_config_owner: VllmConfig
    fed_hidden_size: int | None = None
    tapped_layers: tuple[int, ...] = ()
    vocabulary: Vocabulary
    takes_embeddings: bool = False
    rope_dims: int = 0
    ranks: Callable[[], AbstractContextManager] = nullcontext

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.device = device
        self.dtype = vllm_config.model_config.dtype
        self.speculative_config = vllm_config.speculative_config
        self.draft_model_config = self.speculative_config.draft_model_config
        self.layout = draft_layout(vllm_config)
        drafter = self.speculative_config.drafter
        method = self.speculative_config.draft_sample_method
        self.is_probabilistic = method == "probabilistic"
        self.mask_token_id = drafter.mask_token_id or 0
        self.vocabulary = Vocabulary(self.draft_model_config.get_vocab_size())
        if (mapping := drafter.vocabulary) is not None:
            kind = SpreadVocabulary if self.is_probabilistic else MappedVocabulary
            own = kind(mapping, drafter.mask_token_id, device)
            self.vocabulary, self.mask_token_id = own, own.mask_token_id

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
        """Makes anew what was made of weights, the model's or the target's."""
        refresh_lm_head(self.model)

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
        return self.vocabulary.input_ids(buffers.batch.input_ids, num_tokens)

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
    """Called when weights of a model runner's were loaded again.

    Args:
        runner: of either version; one of vLLM's own speculators may draft.
    """
    drafter = getattr(getattr(runner, "speculator", None), "drafter", None)
    if isinstance(drafter, Drafter):
        with set_current_vllm_config(runner.vllm_config):
            drafter.refresh()
