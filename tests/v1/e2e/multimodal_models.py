# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets with the bundled target as language model, for its drafters.

A Llava, and a Qwen2.5-VL, which has M-RoPE. Their vision towers are random.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.checkpoints.tensors import write_checkpoint

from .images import CELL, END, IMAGE, NORMAL, QWEN_PROCESSOR, START, VIDEO

SECTIONS = [8, 12, 12]  # of 32 frequencies, those of time, height and width
LLAVA_SIDE = 4  # in cells
SQUARE = {"height": CELL * LLAVA_SIDE, "width": CELL * LLAVA_SIDE}
LLAVA_PROCESSOR = CLIPImageProcessorPil(
    size=SQUARE, crop_size=SQUARE, do_center_crop=False, **NORMAL
)
VISION = {"intermediate_size": 64, "hidden_size": 32, "patch_size": CELL}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}


def write_llava(models: Path, folder: Path) -> Path:
    text = json.loads((models / "target/config.json").read_text())
    vision = {"image_size": CELL * LLAVA_SIDE, "num_hidden_layers": 2}
    config = LlavaConfig(
        text_config=text,
        vision_config={
            "model_type": "clip_vision_model",
            "num_attention_heads": 2,
            "projection_dim": 32,
            **VISION,
            **vision,
        },
        image_token_index=IMAGE,
        image_seq_length=LLAVA_SIDE**2,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
    )
    tokenizer = _write(LlavaForConditionalGeneration(config), models, folder)
    lengthen_names(folder)
    LlavaProcessor(
        image_processor=LLAVA_PROCESSOR,
        tokenizer=tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        image_token=tokenizer.convert_ids_to_tokens(IMAGE),
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def lengthen_names(folder: Path) -> None:
    """Renames a tower's weights as in published files, which vLLM expects.

    Newer versions of transformers have shortened these names.
    """
    file = folder / "model.safetensors"
    long = "vision_tower.vision_model."
    tensors = {n.replace("vision_tower.", long): w for n, w in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def write_qwen_vl(models: Path, folder: Path) -> Path:
    text = json.loads((models / "target/config.json").read_text())
    text |= {"rope_parameters": MROPE}
    config = Qwen2_5_VLConfig(
        text_config={k: text[k] for k in text if k not in ("model_type", "head_dim")},
        vision_config=VISION
        | {
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "window_size": 4 * CELL,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=START,
        vision_end_token_id=END,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=False,
    )
    _write(Qwen2_5_VLForConditionalGeneration(config), models, folder)
    QWEN_PROCESSOR.save_pretrained(folder)
    return folder


def _write(model: nn.Module, models: Path, folder: Path) -> Any:
    """Writes a model that contains the bundled target; returns its tokenizer."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(models / "target")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # about the scale of text embeddings
                weight.normal_(0, weight[0].numel() ** -0.5)
        language = model.model.language_model
        for name, tensor in language.named_parameters():
            if name.endswith("proj.bias"):
                tensor.zero_()
        language.load_state_dict(target.model.state_dict(), strict=False)
        model.lm_head.weight.copy_(target.lm_head.weight)
    model.float().save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    tokens = tokenizer.convert_ids_to_tokens([START, END, IMAGE, VIDEO])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_seeing_head(models: Path, folder: Path) -> Path:
    """An EAGLE head that takes the target's embeddings of images.

    It is made of the target's last layer; few of its drafts are accepted.
    """
    config = json.loads((models / "target/config.json").read_text())
    last = f"layers.{config['num_hidden_layers'] - 1}."
    tensors = {
        name.replace(last, "layers.0."): tensor
        for name, tensor in load_file(models / "target/model.safetensors").items()
        if last in name or name == "model.norm.weight"
    }
    half = torch.eye(config["hidden_size"], dtype=torch.bfloat16) / 2
    tensors["model.fc.weight"] = torch.cat([half, half], dim=1)
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return write_checkpoint(folder, config, tensors)


def write_mrope_head(head: Path, folder: Path) -> Path:
    """A bundled head with M-RoPE positions."""
    shutil.copytree(head, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["transformer_layer_config"]["rope_parameters"] = MROPE
    file.write_text(json.dumps(config))
    return folder
