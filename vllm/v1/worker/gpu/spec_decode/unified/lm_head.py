# SPDX-License-Identifier: Apache-2.0
"""`draft_lm_head_quantization` for the lm_head that a drafter has of its own.

vLLM quantizes a copy of the target's, for heads that share it. The copy, and how it
follows new weights, is vLLM's here too: the original weight is kept.
"""

import torch.nn as nn

from vllm.config import SpeculativeConfig
from vllm.model_executor.layers.quantization.online.lm_head import (
    quantized_lm_head_copy,
)


def quantize_lm_head(model: nn.Module, spec: SpeculativeConfig) -> None:
    """Replaces a drafter's lm_head by a quantized copy.

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
