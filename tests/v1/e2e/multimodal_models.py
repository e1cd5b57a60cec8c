# SPDX-License-Identifier: Apache-2.0
"""A Qwen2.5-VL with the bundled target as language model, for its drafters.

It has M-RoPE, and a random vision tower.
"""

import json
import shutil
from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from tests.checkpoints.tensors import write_checkpoint

from .images import CELL, END, IMAGE, QWEN_PROCESSOR, START, VIDEO

SECTIONS = [8, 12, 12]  # of 32 frequencies, those of time, height and width
VISION = {"intermediate_size": 64, "hidden_size": 32, "patch_size": CELL}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": SECTIONS}


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
    return folder


def _write(model: nn.Module, models: Path, folder: Path) -> None:
    """Writes a model that contains the bundled target."""
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
    QWEN_PROCESSOR.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    tokens = tokenizer.convert_ids_to_tokens([START, END, IMAGE, VIDEO])
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)


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
