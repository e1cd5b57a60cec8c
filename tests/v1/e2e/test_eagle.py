# SPDX-License-Identifier: Apache-2.0
"""EAGLE's first version: a head of one layer, without norms."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.tensors import write_checkpoint

from .conftest import RunEngine
from .oracle import EagleOracle, compare_drafts
from .test_unified_speculator import assert_no_fallback, assert_output_matches_target


@pytest.fixture(scope="module")
def eagle_head(models, tmp_path_factory) -> Path:
    """A head made of the target's last layer; few of its drafts are accepted."""
    folder = tmp_path_factory.mktemp("eagle")
    config = json.loads((models / "target" / "config.json").read_text())
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    target = load_file(models / "target" / "model.safetensors")
    last = f"model.layers.{layers - 1}."
    head = {
        name.replace(last, "layers.0."): tensor
        for name, tensor in target.items()
        if name.startswith(last) and "input_layernorm" not in name
    }
    half = torch.eye(size, dtype=torch.bfloat16) / 2
    head["fc.weight"] = torch.cat([half, half], dim=1)
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return write_checkpoint(folder, config, head)


def test_eagle(run_engine: RunEngine, target, make_prompt, eagle_head: Path):
    """Output and drafts with chunked prompts."""
    prompts = [make_prompt(length, 0) for length in (2, 17, 63, 200)]
    requests = [{"prompt": prompt, "max_tokens": 16} for prompt in prompts]
    spec = {"model": str(eagle_head), "method": "eagle", "num_speculative_tokens": 3}
    result = run_engine(
        {"together": requests},
        speculative_config=spec,
        record_drafts=True,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=40,
    )
    assert result["drafter"] == "EagleDrafter"
    assert_output_matches_target(result, target, {"together": requests})
    assert_no_fallback(result["log"], "eagle", 3, 1)
    found = result["scenarios"]["together"]
    texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
    oracle = EagleOracle(eagle_head, target)
    assert compare_drafts(found["drafts"], texts, oracle, width=1) > 20
    assert found["counters"]["num_accepted_tokens"][0] > 0
