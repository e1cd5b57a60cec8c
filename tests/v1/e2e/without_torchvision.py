# SPDX-License-Identifier: Apache-2.0
"""Multimodal models in an engine without torchvision, which CPU installations lack.

They import it for videos, and for faster ways to take images in than their first one.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from images import IMAGE, QWEN_PROCESSOR, VIDEO
from transformers import Qwen2_5_VLProcessor

from vllm import ModelRegistry

# Files of vLLM, and whose classes of transformers they need.
MODELS = {
    "LlavaForConditionalGeneration": ("llava", "pixtral"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_vl"),
}


def processor_of_images(info: Any, **given: Any) -> Qwen2_5_VLProcessor:
    """What `Qwen2_5_VLProcessingInfo.get_hf_processor` returns."""
    made = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    made.tokenizer, made.chat_template = info.get_tokenizer(), None
    made.image_processor = made.video_processor = QWEN_PROCESSOR
    made.image_token_id, made.video_token_id = IMAGE, VIDEO
    made.image_token, made.video_token = made.tokenizer.convert_ids_to_tokens(
        [IMAGE, VIDEO]
    )
    return made


def register_models() -> None:
    """vLLM would look at their classes in a process of its own, which is as ever."""
    for name, (file, needed) in MODELS.items():
        folder = f"transformers.models.{needed}."
        if find_spec("torchvision") is None:
            plain = importlib.import_module(f"{folder}image_processing_pil_{needed}")
            sys.modules[f"{folder}image_processing_{needed}"] = plain
        module = importlib.import_module(f"vllm.model_executor.models.{file}")
        ModelRegistry.register_model(name, getattr(module, name))
    qwen = importlib.import_module("vllm.model_executor.models.qwen2_5_vl")
    qwen.Qwen2_5_VLProcessingInfo.get_hf_processor = processor_of_images
