# SPDX-License-Identifier: Apache-2.0
"""Images, and multimodal models in an engine without torchvision.

CPU installs may lack it; the models import it for videos, and for faster processors.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from vllm import ModelRegistry

# Pixels per side of a cell. Each cell of an image is a token.
CELL = 8
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=CELL // 2, merge_size=2, min_pixels=64, max_pixels=64 * 64, **NORMAL
)


def picture(rows: int, columns: int, seed: int = 0) -> Image.Image:
    """A random image of rows x columns cells."""
    shape = (rows * CELL, columns * CELL, 3)
    pixels = np.random.default_rng(seed).integers(0, 255, shape, dtype=np.uint8)
    return Image.fromarray(pixels)


# Modules of vLLM, and the packages of transformers that they need.
MODELS = {
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", "qwen2_vl"),
    "Gemma3ForConditionalGeneration": ("gemma3_mm", "gemma3"),
    "Mistral3ForConditionalGeneration": ("mistral3", "pixtral"),
}


def processor_of_images(info: Any, **given: Any) -> Any:
    """A Qwen3VLProcessor without a processor of videos."""
    kind, config = transformers.Qwen3VLProcessor, info.get_hf_config()
    made = kind.__new__(kind)
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
    if file == "qwen3_vl":
        module.Qwen3VLProcessingInfo.get_hf_processor = processor_of_images
