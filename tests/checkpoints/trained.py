# SPDX-License-Identifier: Apache-2.0
"""The bundled drafters in the files of every family: trained weights, other names.

What a family's files look like is all that changes, so each drafts as the bundled one
does. Layers that are not a target's defaults are named where families name them.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from .families import Published
from .tensors import Config, Tensors

LAYERS = (1, 3, 5)
MASK = 2
PARD2_LAYERS = (6, 4)  # of the seven states that the target has
WARP = "warp_model.bin"
Rename = Callable[[str], str]
NAMES = (
    "trained-pard",
    "trained-pard2",
    "trained-peagle-speculators",
    "trained-peagle-amazon",
    "trained-peagle-nemo",
    "trained-peagle-specforge",
    "trained-eagle3-speculators",
    "trained-eagle3-nvidia",
    "trained-eagle3-safeailab",
)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _tensors(folder: Path, rename: Rename = str, without: str = "-"):
    def load(config: Config) -> Tensors:
        files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        found = {name: w for file in files for name, w in file.items()}
        return {rename(n): w for n, w in found.items() if not n.startswith(without)}

    return load


def _midlayer(name: str) -> str:
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def _below_model(name: str) -> str:
    is_top = name.startswith(("lm_head", "d2t", "t2d", "mask_hidden"))
    return name if is_top else f"model.{name}"


def _flat(folder: Path, architecture: str, **more: Any) -> dict[str, Any]:
    """A speculators config as one of a transformer."""
    config = _config(folder)
    keys = ("draft_vocab_size", "norm_before_residual")
    kept = {key: config[key] for key in keys}
    changes = {"architectures": [architecture], "model_type": "llama"}
    return config["transformer_layer_config"] | kept | changes | more


def trained(models: Path) -> dict[str, Published]:
    """By name; `models` is the folder of the bundled models."""
    return _pards(models) | _peagles(models / "peagle") | _eagles(models / "eagle3")


def _pards(models: Path) -> dict[str, Published]:
    return {
        "trained-pard": Published(
            family="PARD",
            config=_config(models / "pard"),
            tensors=_tensors(models / "pard"),
            num_drafts=8,
            width=8,
            mask=MASK,
        ),
        "trained-pard2": Published(
            family="PARD-2",
            config=_config(models / "pard2"),
            tensors=_tensors(models / "pard2"),
            num_drafts=15,
            width=15,
            mask=MASK,
            layers=PARD2_LAYERS,
            warp=lambda _: torch.load(models / "pard2" / WARP, weights_only=True),
        ),
    }


def _peagles(folder: Path) -> dict[str, Published]:
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}}
    detected = {"mask": MASK, "layers": LAYERS}
    return {
        "trained-peagle-speculators": Published(
            family="P-EAGLE, speculators",
            config=_config(folder),
            tensors=_tensors(folder),
            num_drafts=8,
            width=8,
            **detected,
        ),
        "trained-peagle-amazon": Published(
            family="P-EAGLE, Amazon",
            config=_flat(folder, "LlamaForCausalLM", ptd_token_id=MASK, **nested),
            tensors=_tensors(folder, _midlayer),
            num_drafts=7,
            width=7,
            **detected,
        ),
        "trained-peagle-nemo": Published(
            family="P-EAGLE, NeMo",
            config=_flat(
                folder,
                "LlamaEagle3DraftModel",
                parallel_drafting=True,
                mask_token_id=MASK,
                num_depths=8,
                eagle_aux_hidden_state_layer_ids=LAYERS,
            ),
            tensors=_tensors(folder, _below_model),
            num_drafts=8,
            width=8,
            **detected,
        ),
        "trained-peagle-specforge": Published(
            family="P-EAGLE, SpecForge or verl-SpeCo",
            config=_flat(folder, "PEagleDraftModel", mask_token_id=MASK, **nested),
            tensors=_tensors(folder, _midlayer),
            num_drafts=7,
            width=7,
            **detected,
        ),
    }


def _eagles(folder: Path) -> dict[str, Published]:
    ids = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    return {
        "trained-eagle3-speculators": Published(
            family="EAGLE-3, speculators",
            config=_config(folder),
            tensors=_tensors(folder),
            num_drafts=7,
            layers=LAYERS,
        ),
        "trained-eagle3-nvidia": Published(
            family="EAGLE-3, SpecForge or NVIDIA",
            config=_flat(folder, "LlamaForCausalLMEagle3", eagle_config=ids),
            tensors=_tensors(folder, _midlayer, without="t2d"),
            num_drafts=3,
            layers=LAYERS,
        ),
        "trained-eagle3-safeailab": Published(
            family="EAGLE-3, SafeAILab",
            config=_flat(folder, "LlamaForCausalLM", torch_dtype="float16", **ids),
            tensors=_tensors(folder, _midlayer),
            num_drafts=3,
            layers=LAYERS,
            dtype=torch.float16,
            files="bin",
        ),
    }
