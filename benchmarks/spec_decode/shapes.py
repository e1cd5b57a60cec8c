# SPDX-License-Identifier: Apache-2.0
"""Model folders to benchmark: shapes and nothing else, for dummy weights.

Speed depends on shapes, not on what the weights hold, so nothing is downloaded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.model_configs import (
    GPT_OSS_20B,
    LLAMA_3_1_8B,
    QWEN_3_8B,
    TARGET,
    Config,
)
from benchmarks.spec_decode.results import MAIN_SHAPES

BUNDLED = Path(__file__).resolve().parents[2] / "models"
# Mode: what the speculative config says beside the model and the number of tokens.
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "pard2": {"method": "draft_model", "parallel_drafting": True},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3", "parallel_drafting": True},
}
PARALLEL = ("pard", "pard2", "peagle")
CONFIGS: dict[str, dict[str, Config]] = {
    MAIN_SHAPES: LLAMA_3_1_8B,
    "qwen3-8b": QWEN_3_8B,
    "gpt-oss-20b": GPT_OSS_20B,
}
SETS = (*CONFIGS, "tiny")


def modes_of(name: str) -> list[str]:
    """The modes that a set of shapes has a drafter for, "none" among them."""
    known = CONFIGS.get(name) or [folder.name for folder in BUNDLED.iterdir()]
    return [mode for mode in MODES if mode == "none" or mode in known]


def write_shapes(name: str, folder: Path) -> dict[str, Path]:
    """Writes a set of shapes below `folder`; returns the folder of each model.

    Raises:
        ValueError: there is no set of that name.
    """
    if name == "tiny":
        return {model: BUNDLED / model for model in (TARGET, *modes_of(name)[1:])}
    if name not in CONFIGS:
        raise ValueError(f"no shapes named {name!r}: choose one of {', '.join(SETS)}")
    for model, config in CONFIGS[name].items():
        (folder / model).mkdir(parents=True, exist_ok=True)
        (folder / model / "config.json").write_text(json.dumps(config, indent=1))
        if model == "pard2":
            _write_projection(config, folder / model)
    return {model: folder / model for model in CONFIGS[name]}


def _write_projection(config: Config, folder: Path) -> None:
    """That of a PARD-2 drafter, which is read from a file with dummy weights too."""
    import torch

    shape = config["hidden_size"], config["pard2_target_dim"]
    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
    torch.save({"target_proj.weight": weight}, folder / "warp_model.bin")


def speculative_config(
    mode: str,
    models: dict[str, Path],
    num_tokens: int,
    acceptance: Sequence[float],
    tree: int = 0,
) -> dict[str, Any] | None:
    """What an engine is started with; None without speculation.

    Args:
        acceptance: chance that drafts 1 to i are all accepted, drawn instead of
            verified, so that every engine accepts the same: [num_tokens].
        tree: nodes of a draft tree, which is verified by a recording.
    """
    if mode == "none":
        return None
    config = {
        **MODES[mode],
        "model": str(models[mode]),
        "num_speculative_tokens": num_tokens,
    }
    if tree:
        return config | {"draft_tree": tree}
    return config | {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(acceptance),
    }
