# SPDX-License-Identifier: Apache-2.0
"""The target's hidden states that a PARD-2 takes, and when it drafts without them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vllm.config import SpeculativeConfig
from vllm.config.drafter.target import WARP, load_warp

from .bad_row import config
from .specs import engine_config

WIDTH, DEPTH, HIDDEN = 256, 6, 192  # the bundled target, and the drafter's width


def projection(rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {"target_proj.weight": torch.zeros(rows, columns, dtype=torch.bfloat16)}


@pytest.fixture
def configure(models, tmp_path):
    """Configures the bundled target with a PARD-2 that has these config keys."""

    def run(tensors: dict | None, **keys) -> SpeculativeConfig:
        folder = tmp_path / "drafter"
        shutil.copytree(models / "pard", folder)
        config(spd_type="pard2", **keys)(folder)
        if tensors is not None:
            torch.save(tensors, folder / WARP)
        engine = engine_config(models / "target", {"model": str(folder)})
        return engine.speculative_config

    return run


@pytest.mark.parametrize(
    "keys, layers, tapped",
    [
        ({"pard2_target_layers": [-1, -3, -5], "pard2_scale": 0.5}, (6, 4, 2), (2, 4)),
        ({"pard2_target_layers": [3, -2, 3]}, (3, 5, 3), (3, 5)),
        ({"pard2_target_layers": [-7]}, (0,), (0,)),
        # Original names of the keys, and no keys.
        ({"pard2_target_layers": [-4], "target_layers": [-2]}, (3,), (3,)),
        ({"target_layers": [-2], "feat_scale": 0.5}, (5,), (5,)),
        ({}, (6,), ()),
    ],
)
def test_layers(configure, keys: dict, layers: tuple, tapped: tuple):
    """Numbered as in transformers: the last state is after the norm, and not tapped."""
    spec = configure(projection(HIDDEN, len(layers) * WIDTH), **keys)
    features = spec.drafter.target_features
    assert (features.layers, features.depth) == (layers, DEPTH)
    is_scaled = "pard2_scale" in keys or "feat_scale" in keys
    assert features.scale == (0.5 if is_scaled else 0.02)
    assert features.tapped == tapped
    config = spec.draft_model_config.hf_config
    assert config.eagle_aux_hidden_state_layer_ids == list(tapped)
    # The target's compiled graph returns them, so its hash depends on them.
    whole = spec.compute_hash()
    spec.drafter = replace(spec.drafter, tapped_layers=())
    assert (spec.compute_hash() == whole) == (not tapped)


@pytest.mark.parametrize(
    "tensors, keys, why",
    [
        (None, {}, "it has no warp_model.bin. Download that file too."),
        (
            projection(HIDDEN, WIDTH * 2),
            {},
            "has shape [192, 512], and 1 layers of this target need [192, 256].",
        ),
        (projection(128, WIDTH), {}, "has shape [128, 256]"),
        (
            projection(HIDDEN, WIDTH * 4),
            {"pard2_ml": True},
            "it is fed layers [-1, -8, -16, -24], and the target has 6.",
        ),
        (projection(HIDDEN, WIDTH), {}, "the unified speculator does not run"),
    ],
)
def test_drafts_without_target_states(
    configure, caplog_vllm, monkeypatch, tensors, keys, why: str
):
    if "does not run" in why:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    spec = configure(tensors, **keys)
    assert spec.drafter.target_features is None
    assert spec.parallel_drafting and spec.method == "draft_model"
    said = [r.getMessage() for r in caplog_vllm.records if "PARD-2" in r.getMessage()]
    assert len(said) == 1 and why in said[0]
    assert "drafts without the target's hidden states" in said[0]


def test_pickled_code_is_not_run(tmp_path: Path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "it ran",)

    torch.save({"target_proj.weight": Payload()}, tmp_path / WARP)
    with pytest.raises(ValueError, match="holds more than tensors"):
        load_warp(tmp_path / WARP)
    assert not (tmp_path / "it ran").exists()
