# SPDX-License-Identifier: Apache-2.0
"""Drafting with a separate language model, autoregressive or parallel; and what a draft
step asks of any drafter. Another kind is a file beside this one: a subclass of
`Drafter`, chosen in `drafter_class`.

Autoregressive: speculative sampling, arXiv 2211.17192 and arXiv 2302.01318. Parallel,
with masks in place of the drafts not yet known: PARD, arXiv 2504.18583.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn

from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, replace, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.quantization.online.lm_head import (
    quantized_lm_head_copy,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.draft_quantization import DRAFT_MODEL
from vllm.model_executor.models.utils import get_draft_quant_config
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables

from ..config import draft_ranks
from ..input_kernel import HiddenRows
from ..inputs import DraftInputs
from ..layout import DraftLayout
from ..sampler import MappedVocabulary, SpreadVocabulary, Vocabulary

ModelInputs = dict[str, torch.Tensor | None]


class Drafter:
    """How a draft model is loaded, and what its inputs are: here tokens alone, nothing
    from the target. What else a kind of drafter takes, it overrides.

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

    def load(self, target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        """Loads the draft model into `model`, and returns it.

        Args:
            target_model: may share weights with the draft model.
            vllm_config: the engine's, widened for draft batches.

        Raises:
            ValueError: the model lacks what the layout needs.
        """
        self.ranks = draft_ranks(vllm_config)
        with self.ranks():
            self.model, self.cache_config_owner = load_draft_model(vllm_config)
        return self.model

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
            aux: [num_tokens, H] each, of the tapped layers, as the head lists them.
        """
        return None

    def model_inputs(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> ModelInputs:
        """The model's arguments, from the buffers."""
        ids = self.vocabulary.input_ids(inputs.batch.input_ids, num_tokens)
        return {"input_ids": ids, "positions": inputs.positions(num_tokens)}

    def feed_back(self, rows: torch.Tensor) -> HiddenRows | None:
        """The hidden states of a pass as the next one takes them.

        Args:
            rows: [num_reqs * W, H], those at the sampled slots.
        """
        return None


def load_draft_model(vllm_config: VllmConfig) -> tuple[nn.Module, VllmConfig]:
    """Loads the draft model by its own files; also returns the config of its KV cache.

    Its quantization is its own too, and by the names in its files.
    """
    spec, changes = vllm_config.speculative_config, {}
    has_own_cache = spec.kv_cache_dtype is not None
    if has_own_cache:
        cache = replace(vllm_config.cache_config, cache_dtype=spec.kv_cache_dtype)
        changes["cache_config"] = cache
    rank = vllm_config.parallel_config.rank
    own = replace(
        vllm_config,
        model_config=spec.draft_model_config,
        parallel_config=replace(spec.draft_parallel_config, rank=rank),
        quant_config=get_draft_quant_config(vllm_config),
        **changes,
    )
    with set_model_tag(DRAFT_MODEL):
        model = get_model(vllm_config=own, prefix=DRAFT_MODEL)
    if spec.draft_lm_head_quantization is not None:
        quantize_lm_head(model, spec)
    return model, own if has_own_cache else vllm_config


def quantize_lm_head(model: nn.Module, spec: SpeculativeConfig) -> None:
    """Replaces a drafter's lm_head by a quantized copy, vLLM's own for heads that share
    the target's: the original weight is kept.

    Raises:
        ValueError: it has none, or one that is not of plain bfloat16 or half weights;
            or it is an MTP module's, each of whose layers may have an lm_head.
    """
    if spec.method == "mtp":
        raise ValueError(
            "draft_lm_head_quantization needs an MTP module that shares the target's "
            "lm_head: unset it."
        )
    is_part = hasattr(model, "get_language_model")
    owner = model.get_language_model() if is_part else model
    if (head := getattr(owner, "lm_head", None)) is None:
        raise ValueError(
            f"{type(model).__name__} has no lm_head, which draft_lm_head_quantization "
            "needs: unset it."
        )
    owner.lm_head = quantized_lm_head_copy(head, spec.draft_lm_head_quantization)


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
