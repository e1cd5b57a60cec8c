# SPDX-License-Identifier: Apache-2.0
"""Models to benchmark: published config.json files, loaded with dummy weights.

Speed depends on shapes, not on the values of weights, so nothing is downloaded. A set
is a folder of `models/`, with a target and a drafter for each supported mode; an MTP
module is a part of the target.
"""

import json
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("models")
MAIN, TINY = "llama-3.1-8b", "tiny"  # tiny: the bundled models, which have weights
SETS = (MAIN, *sorted(f.name for f in FOLDER.iterdir() if f.name != MAIN), TINY)
# By mode: keys of the speculative config besides the model and the number of tokens.
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "pard2": {"method": "draft_model", "parallel_drafting": True},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash": {"method": "dflash"},
    "dflash2": {"method": "dflash"},
    "lilicorr": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "mtp": {"method": "mtp"},
}
PARALLEL = ("pard", "pard2", "peagle")
BLOCK = ("dflash", "dflash2", "lilicorr", "dspark")


def folder_of(shapes: str) -> Path:
    return ROOT / "models" if shapes == TINY else FOLDER / shapes


def modes_of(shapes: str) -> list[str]:
    """The modes that a set has a drafter for, and "none"."""
    folder = folder_of(shapes)
    has_mtp = "num_nextn_predict_layers" in read_config(folder / "target")
    of_target = ("none", "mtp")[: 1 + has_mtp]
    return [mode for mode in MODES if mode in of_target or (folder / mode).is_dir()]


def write_models(shapes: str, folder: Path) -> Path:
    """Copies a set to `folder`, and adds the files that are needed besides weights."""
    if shapes == TINY:
        return folder_of(shapes)
    models = folder / shapes
    shutil.copytree(folder_of(shapes), models)
    if (models / "pard2").is_dir():
        write_projection(models / "pard2")
    return models


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write_projection(folder: Path) -> None:
    """Writes a PARD-2 drafter's projection, which is read from a separate file."""
    import torch

    config = read_config(folder)
    shape = config["hidden_size"], config["pard2_target_dim"]
    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")


def complete_dummy_heads() -> None:
    """Gives heads what vLLM makes as it loads a file; call it before an engine loads.

    A published head with a reduced vocabulary has its own lm_head, which vLLM detects
    when it loads the weights. With dummy weights it is not detected, and the drafter
    would rank the target's whole vocabulary. LiLiCorr's head derives buffers from its
    weights. It works for this tree and vLLM's release.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    from vllm.model_executor.models.lilicorr import LiLiCorrHead
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    Eagle3LlamaForCausalLM.has_own_lm_head = True
    load_weights = DummyModelLoader.load_weights

    def load_and_derive(loader: Any, model: Any, config: Any) -> None:
        load_weights(loader, model, config)
        for module in model.modules():
            if isinstance(module, LiLiCorrHead):
                weight = module.slot_embedding
                module.materialize_inference_buffers(weight.device, weight.dtype)

    DummyModelLoader.load_weights = load_and_derive
