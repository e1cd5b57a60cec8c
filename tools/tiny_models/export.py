# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as vLLM and Hugging Face read them, in bf16."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from .settings import MASK_ID, PARD2_LAYERS, PARD2_SCALE, Run


def save_llama(run: Run, name: str, model: LlamaForCausalLM, **keys: Any) -> None:
    """Save a plain Llama and its tokenizer.

    Args:
        keys: go into its config.
    """
    folder = run.model_dir(name)
    model.config.update(keys)
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in sorted((run.work / "tokenizer").iterdir()):
        shutil.copy(path, folder)


def save_pard2(run: Run, draft: LlamaForCausalLM, proj: torch.nn.Linear) -> None:
    """Save a PARD-2 draft as its authors do: the projection is a file of its own.

    What was not trained is PARD's, and its part of the checkpoint a link to PARD's.
    Without a tokenizer, to save room: it has the target's tokens.
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
    _share(folder, "../pard/model.safetensors", draft)
    weight = proj.weight.detach().to(torch.bfloat16).cpu()
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")


def _share(folder: Path, frozen: str, model: LlamaForCausalLM) -> None:
    """Split a saved model in two: a link to ``frozen``, and what was trained."""
    (folder / "model.safetensors").unlink()
    parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    named = dict(model.named_parameters())  # tied ones once
    trained = {k: v.detach().cpu() for k, v in named.items() if v.requires_grad}
    (folder / parts[0]).unlink(missing_ok=True)
    (folder / parts[0]).symlink_to(frozen)
    save_file(trained, folder / parts[1], {"format": "pt"})
    index = {
        "metadata": {"total_size": sum(2 * v.numel() for v in named.values())},
        "weight_map": {name: parts[name in trained] for name in sorted(named)},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def save_head(run: Run, name: str, head: Any, drop: tuple[str, ...] = ()) -> None:
    """Save a head of speculators, without the target's frozen weights.

    Args:
        drop: tensors left out because vLLM then shares the target's.
    """
    # The path that was trained with may mean nothing elsewhere.
    head.config.speculators_config.verifier.name_or_path = "models/target"
    head.to(torch.bfloat16)
    frozen = (*drop, "verifier_norm.weight", "verifier_lm_head.weight")
    state = {k: v for k, v in head.state_dict().items() if k not in frozen}
    folder = run.model_dir(name)
    head.save_pretrained(folder, state_dict=state)
    # The library's config class is saved beside the weights: no loader of ours or of
    # vLLM runs code out of a checkpoint.
    (folder / "config.py").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text)
