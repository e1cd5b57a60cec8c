# SPDX-License-Identifier: Apache-2.0
"""Drafting with a separate language model, autoregressive or parallel.

Autoregressive: speculative sampling, arXiv 2211.17192 and arXiv 2302.01318. Parallel,
with masks in place of the drafts not yet known: PARD, arXiv 2504.18583.
"""

import torch.nn as nn

from vllm.compilation.backends import set_model_tag
from vllm.config import SpeculativeConfig, VllmConfig, replace
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.quantization.online.lm_head import (
    quantized_lm_head_copy,
)
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.draft_quantization import DRAFT_MODEL
from vllm.model_executor.models.utils import get_draft_quant_config

from ..config import draft_ranks
from ..inputs import DraftInputs
from .base import Drafter, ModelInputs


class DraftModelDrafter(Drafter):
    """Feeds tokens only; the draft model takes nothing from the target."""

    def load(self, target_model: nn.Module, vllm_config: VllmConfig) -> nn.Module:
        self.ranks = draft_ranks(vllm_config)
        with self.ranks():
            self.model, self.cache_config_owner = load_draft_model(vllm_config)
        return self.model

    def model_inputs(
        self, inputs: DraftInputs, num_tokens: int, is_first: bool, mode: CUDAGraphMode
    ) -> ModelInputs:
        ids = self.vocabulary.input_ids(inputs.batch.input_ids, num_tokens)
        return {
            "input_ids": ids,
            "positions": inputs.positions(num_tokens),
        }


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
