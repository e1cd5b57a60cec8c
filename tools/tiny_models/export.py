# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in bf16, in the formats of vLLM and Hugging Face."""

import json
import shutil
from typing import Any

import torch
from transformers import LlamaForCausalLM

from .settings import MASK_ID, PARD2_LAYERS, PARD2_SCALE, Run


def save_llama(run: Run, name: str, model: LlamaForCausalLM, **keys: Any) -> None:
    """Save a plain Llama model and its tokenizer.

    Args:
        keys: added to its config.
    """
    folder = run.model_dir(name)
    model.config.update(keys)
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in sorted((run.work / "tokenizer").iterdir()):
        shutil.copy(path, folder)


def save_pard2(run: Run, draft: LlamaForCausalLM, proj: torch.nn.Linear) -> None:
    """Save a PARD-2 draft model as its authors do, with the projection in its own file.

    The tokenizer, which is the target's, is left out to save space.
    """
    folder = run.model_dir("pard2")
    keys = {
        "spd_type": "pard2",
        "pard_token": MASK_ID,
        "pard2": True,
        "pard2_proj_bias": False,
        "pard2_scale": PARD2_SCALE,
        "pard2_target_dim": proj.in_features,
        "pard2_target_layers": list(PARD2_LAYERS),
    }
    draft.config.update(keys)
    draft.to(torch.bfloat16).save_pretrained(folder)
    weight = proj.weight.detach().to(torch.bfloat16).cpu()
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")


def save_head(run: Run, name: str, head: Any, drop: tuple[str, ...] = ()) -> None:
    """Save a head of the speculators library, without the target's frozen weights.

    Args:
        drop: tensors left out, so that vLLM shares the target's.
    """
    # The path that it was trained with may not exist elsewhere.
    head.config.speculators_config.verifier.name_or_path = "models/target"
    head.to(torch.bfloat16)
    frozen = (*drop, "verifier_norm.weight", "verifier_lm_head.weight")
    state = {k: v for k, v in head.state_dict().items() if k not in frozen}
    folder = run.model_dir(name)
    head.save_pretrained(folder, state_dict=state)
    # The library saves its config class too, but neither our loader nor vLLM's runs
    # code from a checkpoint.
    (folder / "config.py").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text)
