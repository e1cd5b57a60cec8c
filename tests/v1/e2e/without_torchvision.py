# SPDX-License-Identifier: Apache-2.0
"""Multimodal models in an engine without torchvision, which CPU installs may lack.

They import it for videos, and for faster image processors.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers

from vllm import ModelRegistry

from .images import QWEN_PROCESSOR

# Modules of vLLM, and the packages of transformers that they need.
MODELS = {
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "qwen2_vl"),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen2_vl"),
    "Gemma3ForConditionalGeneration": ("gemma3_mm", "gemma3"),
    "Mistral3ForConditionalGeneration": ("mistral3", "pixtral"),
}
# Modules that also need a video processor: class with the method `get_hf_processor`,
# and class of the processor.
WITH_VIDEOS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessingInfo", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("Qwen3VLProcessingInfo", "Qwen3VLProcessor"),
}


def processor_of_images(info: Any, kind: type) -> Any:
    """What `get_hf_processor` returns, without a processor of videos."""
    made, config = kind.__new__(kind), info.get_hf_config()
    made.tokenizer, made.chat_template = info.get_tokenizer(), None
    made.image_processor = made.video_processor = QWEN_PROCESSOR
    made.image_token_id, made.video_token_id = (
        config.image_token_id,
        config.video_token_id,
    )
    made.image_token, made.video_token = made.tokenizer.convert_ids_to_tokens(
        [made.image_token_id, made.video_token_id]
    )
    return made


def take_plain(needed: str) -> None:
    """Makes a package of transformers process images without torchvision."""
    folder = f"transformers.models.{needed}"
    plain = importlib.import_module(f"{folder}.image_processing_pil_{needed}")
    for name in [name for name in vars(plain) if name.endswith("Pil")]:
        setattr(plain, name.removesuffix("Pil"), getattr(plain, name))
    sys.modules[f"{folder}.image_processing_{needed}"] = plain
    if needed == "pixtral":
        made = importlib.import_module(f"{folder}.processing_pixtral")
        sys.modules[folder].PixtralProcessor = made.PixtralProcessor


def register_model(folder: str) -> None:
    """Registers a model's class here, as vLLM would inspect it in an unpatched process.

    Args:
        folder: of the model.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    (name,) = config["architectures"]
    file, needed = MODELS[name]
    if find_spec("torchvision") is None:
        take_plain(needed)
    module = importlib.import_module(f"vllm.model_executor.models.{file}")
    ModelRegistry.register_model(name, getattr(module, name))
    if file in WITH_VIDEOS:
        leave_out_videos(module, *WITH_VIDEOS[file])


def leave_out_videos(module: ModuleType, info: str, processor: str) -> None:
    kind = getattr(transformers, processor)
    getattr(module, info).get_hf_processor = lambda self, **given: processor_of_images(
        self, kind
    )
