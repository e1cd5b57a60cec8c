# SPDX-License-Identifier: Apache-2.0
"""`hf_overrides` of a speculative config: as if the drafter's config.json said so."""

import json
import shutil
from typing import Any

import pytest

from .bad_row import config
from .specs import engine_config

NESTED = "transformer_layer_config"
ROPE = {"rope_type": "default", "rope_theta": 500.0}


@pytest.fixture
def configure(models, tmp_path):
    """Configures a copy of a bundled drafter."""

    def run(drafter: str, overrides: Any = None, **spec: Any):
        if not (folder := tmp_path / "drafter").exists():
            shutil.copytree(models / drafter, folder)
        spec = {"model": str(folder), "hf_overrides": overrides, **spec}
        return engine_config(models / "target", spec).speculative_config

    run.folder = tmp_path / "drafter"
    return run


def described(spec: Any) -> tuple:
    config = spec.draft_model_config.hf_config.to_dict()
    return spec.drafter, json.loads(json.dumps(config, default=str))


@pytest.mark.parametrize(
    "drafter, overrides, edits",
    [
        ("draft", {"rms_norm_eps": 0.5}, {"rms_norm_eps": 0.5}),
        ("draft", {"rope_parameters": ROPE}, {"rope_parameters": ROPE}),
        ("draft", {"num_depths": 3}, {"num_depths": 3}),
        ("pard", {"pard_token": 5}, {"pard_token": 5}),
        ("pard", {"pard_token": None}, {"pard_token": None}),
        ("pard2", {"pard2_scale": 0.5}, {"pard2_scale": 0.5}),
        ("peagle", {"mask_token_id": 5}, {"mask_token_id": 5, "pard_token": 2}),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [5, 0, 2]},
            {"eagle_aux_hidden_state_layer_ids": [5, 0, 2]},
        ),
        ("eagle3", {"rms_norm_eps": 0.5}, {f"{NESTED}__rms_norm_eps": 0.5}),
        ("eagle3", {NESTED: {"rms_norm_eps": 0.5}}, {f"{NESTED}__rms_norm_eps": 0.5}),
    ],
)
def test_overrides_act_like_edits_of_the_file(
    drafter: str, overrides: dict, edits: dict, configure
):
    plain, found = (described(configure(drafter, each)) for each in (None, overrides))
    config(**edits)(configure.folder)
    edited = described(configure(drafter))
    assert found[0] == edited[0]
    for key in ("pard_token", "mask_token_id", "num_depths"):  # copied by vLLM
        found[1].pop(key, None), edited[1].pop(key, None)
    assert found[1] == edited[1]
    assert found != plain


@pytest.mark.parametrize("drafter", ["draft", "eagle3"])
def test_rope_theta_is_overridden(drafter: str, configure):
    """transformers moves it to `rope_parameters`; vLLM ignores it for a target."""
    made = configure(drafter, {"rope_theta": 500.0}).draft_model_config.hf_config
    assert made.rope_parameters == ROPE


def test_overrides_must_be_keys_and_values(configure):
    with pytest.raises(ValueError, match="hf_overrides"):
        configure("eagle3", "rope_theta")
    with pytest.raises(ValueError, match=f"{NESTED} in hf_overrides must be keys"):
        configure("eagle3", {NESTED: 5})
