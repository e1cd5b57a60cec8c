# SPDX-License-Identifier: Apache-2.0
"""The interface between a kind of draft model and the draft step.

A new kind is one file: a subclass of `Drafter`, chosen in `drafter_class`.
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

from ..input_kernel import HiddenRows
from ..inputs import DraftInputs
from ..layout import DraftLayout
from ..vocabulary import MappedVocabulary, SpreadVocabulary, Vocabulary

ModelInputs = dict[str, torch.Tensor | None]


class Drafter(ABC):
    """How a draft model is loaded, and what its inputs are.

    Attributes:
        layout: the slots for the most drafts that a step may ask for.
        model: the draft model, once it is loaded.
        cache_config_owner: the config whose cache config the draft model uses.
        fed_hidden_size: width of the hidden states that a later pass takes; None if
            it takes none.
        tapped_layers: target layers whose hidden states are needed besides its output.
        vocabulary: the vocabulary of the model's logits.
        mask_token_id: the token of mask slots.
        is_probabilistic: whether drafts are verified against the logits that they were
            sampled from, which then are over the target's vocabulary.
        takes_embeddings: whether it takes the target's multimodal embeddings; otherwise
            it gets the placeholder tokens.
        rope_dims: dimensions of its M-RoPE positions; 0 for plain positions.
        keeps_states: whether the target's hidden states are kept for later steps, and
            passed on to later passes in place of the model's own; see `Pard2Drafter`.
        ranks: makes the context in which the draft model is built and run.
    """

    model: nn.Module
    cache_config_owner: VllmConfig
    fed_hidden_size: int | None = None
    tapped_layers: tuple[int, ...] = ()
    vocabulary: Vocabulary
    takes_embeddings: bool = False
    rope_dims: int = 0
    keeps_states: bool = False
    ranks: Callable[[], AbstractContextManager] = nullcontext

    def __init__(self, vllm_config: VllmConfig, device: torch.device):
        self.dtype = vllm_config.model_config.dtype
        self.speculative_config = vllm_config.speculative_config
        self.draft_model_config = self.speculative_config.draft_model_config
        drafter = self.speculative_config.drafter
        self.layout = DraftLayout(
            num_speculative_tokens=drafter.num_speculative_tokens,
            token_shift=0 if drafter.method == "draft_model" else 1,
            parallel_width=drafter.parallel_width,
            num_beams=drafter.num_beams,
        )
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
            target_model: may share weights with the draft model.
            vllm_config: the engine's, widened for draft batches.

        Raises:
            ValueError: the model lacks what the layout needs.
        """

    def refresh(self) -> None:
        """Recomputes what was derived from weights, the model's or the target's."""
        return None

    def set_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables, kv_group: int
    ) -> None:
        """Called once the KV cache config is known.

        Args:
            kv_cache_config: of all KV groups.
            block_tables: the target's.
            kv_group: the first one with layers of the draft model.
        """
        return None

    def target_hidden(
        self, last: torch.Tensor, aux: list[torch.Tensor] | None
    ) -> HiddenRows | None:
        """The target's hidden states as the first pass takes them.

        Args:
            last: [num_tokens, H], the target's output.
            aux: [num_tokens, H] each, of the tapped layers, by ascending layer.
        """
        return None

    @abstractmethod
    def model_inputs(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> ModelInputs:
        """The model's arguments, from the buffers."""

    def feed_back(self, rows: torch.Tensor) -> HiddenRows | None:
        """The hidden states of a pass as the next one takes them.

        Args:
            rows: [num_reqs * W, H], those at the sampled slots.
        """
        return None


def refresh_drafter(runner: Any) -> None:
    """Called after a model runner has reloaded weights.

    Args:
        runner: V1 or V2; it may have one of vLLM's own speculators.
    """
    speculator = getattr(runner, "speculator", None)
    drafter = getattr(speculator, "drafter", None)
    if isinstance(drafter, Drafter):
        with set_current_vllm_config(runner.vllm_config):
            drafter.refresh()
