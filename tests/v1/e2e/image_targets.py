# SPDX-License-Identifier: Apache-2.0
"""Tiny targets that take images, and count like those of `target_models.py`.

Their vision towers are random. Sampled output depends on the images; greedy output
counts on regardless. Engines run them without torchvision, which CPU installs may lack:
the models import it for videos, and for faster processors.
"""

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import (
    Gemma3ImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
)

from vllm import ModelRegistry

from .target_models import SIZES, TOKENS, VOCAB, WINDOWS, plant

# Pixels per side of a cell. Each cell of an image is a token.
CELL = 8
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN_PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=CELL // 2, merge_size=2, min_pixels=64, max_pixels=64 * 64, **NORMAL
)
PATCH, MERGED = CELL // 2, 2  # MERGED: patches per side of a cell
SIDE = 4  # cells per side of the largest image, and of every image for Gemma
EDGE = CELL * SIDE
# Special tokens of images have the ids after those of BOS and EOS.
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
GEMMA = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
MISTRAL = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
LINES = ["\n" * count for count in range(1, 5)]  # Gemma has them around images
VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": PATCH}
TOWER = VISION | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": EDGE}
QWEN_TOWER = VISION | {
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": SIZES["hidden_size"],
    "spatial_merge_size": MERGED,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [6, 5, 5],
    "mrope_interleaved": True,
}


def number(marks: dict[str, str], name: str) -> int:
    """The id of a special token."""
    return TOKENS + 2 + list(marks).index(name)


class Kind(NamedTuple):
    """A kind of target."""

    config: str  # name of its class
    more: dict[str, Any]  # keys of it
    marks: dict[str, str]  # special tokens of images, by their names in transformers
    stands_for: tuple[str, ...]  # those in a prompt that an image replaces
    images: Any  # processes images
    processor: dict[str, Any]  # settings of the one that puts images into prompts

    def image(self) -> list[int]:
        """Tokens of a prompt that represent an image."""
        return [number(self.marks, name) for name in self.stands_for]


# Named as in `docs/targets.md`.
IMAGE_TARGETS = {
    "Qwen3-VL": Kind(
        "Qwen3VLConfig",
        {
            "text_config": SIZES | {"rope_parameters": MROPE},
            "vision_config": QWEN_TOWER,
            **{f"{name}_id": number(QWEN, name) for name in QWEN},
        },
        QWEN,
        ("vision_start_token", "image_token", "vision_end_token"),
        QWEN_PROCESSOR,
        {},
    ),
    "Gemma 3 with images": Kind(
        "Gemma3Config",
        {
            "text_config": SIZES | WINDOWS,
            "vision_config": TOWER,
            "mm_tokens_per_image": SIDE**2,
            **{f"{name}_index": number(GEMMA, name) for name in GEMMA},
        },
        GEMMA,
        ("boi_token",),
        Gemma3ImageProcessorPil(size={"height": EDGE, "width": EDGE}, **NORMAL),
        {"image_seq_length": SIDE**2},
    ),
    "Mistral 3": Kind(
        "Mistral3Config",
        {
            "text_config": SIZES | {"model_type": "mistral", "sliding_window": None},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 16},
            "image_token_index": number(MISTRAL, "image_token"),
            "spatial_merge_size": MERGED,
        },
        MISTRAL,
        ("image_token",),
        PixtralImageProcessorPil(
            size={"longest_edge": EDGE}, patch_size=PATCH, **NORMAL
        ),
        MISTRAL | {"patch_size": PATCH, "spatial_merge_size": MERGED},
    ),
}


def save_image_target(kind: Kind, folder: Path) -> Path:
    made = getattr(transformers, kind.config)(**kind.more, tie_word_embeddings=False)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        made, dtype=torch.float32
    )
    with torch.no_grad():
        for part, weight in model.named_parameters():
            is_text = "language_model" in part or "lm_head" in part
            if weight.dim() > 1 and not is_text:
                weight.normal_(0, weight[0].numel() ** -0.5)
    plant(model, step=1)
    model.save_pretrained(folder)
    if kind.marks is GEMMA:
        lengthen_names(folder)
    kind.images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(kind.processor))
    _tokenizer(kind.marks).save_pretrained(folder)
    return folder


def lengthen_names(folder: Path) -> None:
    """Renames a tower's weights as in published files, which vLLM expects.

    Newer versions of transformers have shortened these names.
    """
    file = folder / "model.safetensors"
    long = "vision_tower.vision_model."
    tensors = {n.replace("vision_tower.", long): w for n, w in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def _tokenizer(marks: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer with the special tokens; prompts are given as token ids."""
    names = [f"<{token}>" for token in range(VOCAB)]
    first = TOKENS + 2
    known = [*marks.values(), *LINES]
    names[first : first + len(known)] = known
    vocabulary = {name: token for token, name in enumerate(names)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")),
        extra_special_tokens=marks,
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
    for name in ("image_token", "video_token"):
        token = getattr(config, f"{name}_id")
        setattr(made, f"{name}_id", token)
        setattr(made, name, made.tokenizer.convert_ids_to_tokens(token))
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
    """Registers a model's class: vLLM would inspect it in an unpatched process."""
    config = json.loads((Path(folder) / "config.json").read_text())
    (name,) = config["architectures"]
    file, needed = MODELS[name]
    if find_spec("torchvision") is None:
        take_plain(needed)
    module = importlib.import_module(f"vllm.model_executor.models.{file}")
    ModelRegistry.register_model(name, getattr(module, name))
    if file == "qwen3_vl":
        module.Qwen3VLProcessingInfo.get_hf_processor = processor_of_images
