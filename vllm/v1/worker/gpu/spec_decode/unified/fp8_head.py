# SPDX-License-Identifier: Apache-2.0
"""A drafter's lm_head in fp8, as vLLM quantizes linear layers while they load.

The config key is named as in vLLM 0.33, `draft_lm_head_quantization`, where it
quantizes an EAGLE head's copy of the target's lm_head (proposed in vLLM PR #47584).
Here it applies to any drafter's lm_head.
"""

import torch
import torch.nn as nn

from vllm.config.quantization import resolve_quantization_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    record_metadata_for_reloading,
)
from vllm.utils.torch_utils import set_default_torch_dtype

logger = init_logger(__name__)


class Fp8Head(nn.Module):
    """An lm_head in fp8, with a scale per row of the weight and one per input token.

    It is a copy: if the target or the drafter's embeddings share the original weight,
    they keep it. It has the attributes that vLLM reads of a `ParallelLMHead`. Weights
    that are sent to it while serving are quantized like those of vLLM's own layers.

    Attributes:
        source: the module that it is a copy of, in a tuple, so that it is not
            registered as a submodule; empty if nothing else has that weight.
    """

    weight_loader = VocabParallelEmbedding.weight_loader

    def __init__(self, head: nn.Module):
        """
        Args:
            head: an lm_head whose weight is [rows of this rank, H], bfloat16 or half.
        """
        super().__init__()
        self.source: tuple[nn.Module, ...] = ()
        args = resolve_quantization_config("fp8_per_channel", None)
        self.quant_config = OnlineQuantizationConfig(args)
        self.tp_size, self.shard_indices = head.tp_size, head.shard_indices
        self.org_vocab_size = head.org_vocab_size
        weight = head.weight.detach()
        rows, width = weight.shape
        self.num_embeddings_per_partition = rows
        self.input_size, self.output_size = width, rows * self.tp_size
        with set_default_torch_dtype(weight.dtype):  # the dtype of the logits
            self.quant_method = Fp8PtpcOnlineLinearMethod()
            self.quant_method.create_weights(
                self,
                width,
                [rows],
                self.input_size,
                self.output_size,
                weight.dtype,
                weight_loader=self.weight_loader,
            )
        record_metadata_for_reloading(self)
        info = get_layerwise_info(self)
        info.restore_device = weight.device
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.quant_method.process_weights_after_loading(self)
        info.reset()  # nothing more is loaded now

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies a shared weight again, in place: it may have been reloaded."""
        for source in self.source:
            for name, tensor in Fp8Head(source).named_parameters():
                self.get_parameter(name).copy_(tensor)


def quantize_lm_head(model: nn.Module, target_model: nn.Module) -> None:
    """Replaces a drafter's lm_head by a copy in fp8.

    Args:
        target_model: may share its lm_head with the drafter.

    Raises:
        ValueError: the model has none, or one that is quantized already.
    """
    owner = _owner(model)
    head = getattr(owner, "lm_head", None)
    plain = UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    method = getattr(head, "quant_method", None)
    if not isinstance(method, plain) or getattr(head, "bias", None) is not None:
        raise ValueError(
            f"{type(model).__name__} has no lm_head of plain weights, which "
            "draft_lm_head_quantization needs: unset it."
        )
    owner.lm_head = Fp8Head(head)
    others = *model.parameters(), *target_model.parameters()
    if any(weight is head.weight for weight in others):
        owner.lm_head.source = (head,)
    logger.info(
        "The drafter's lm_head is a copy in fp8, %.3f GiB.",
        owner.lm_head.weight.nbytes / 2**30,
    )


def refresh_lm_head(model: nn.Module) -> None:
    """Called after the weights of a draft model, or of its target, were reloaded."""
    head = getattr(_owner(model), "lm_head", None)
    if isinstance(head, Fp8Head):
        head.refresh()


def _owner(model: nn.Module) -> nn.Module:
    """The language model, which has the lm_head."""
    is_part = hasattr(model, "get_language_model")
    return model.get_language_model() if is_part else model
