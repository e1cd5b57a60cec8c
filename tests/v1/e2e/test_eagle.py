# SPDX-License-Identifier: Apache-2.0
"""EAGLE's first version: a head of one layer, without norms."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints.tensors import write_checkpoint

from .hooks import drafter_name
from .oracle import EagleOracle, assert_output_matches, compare_drafts
from .runner import Request
from .test_unified_speculator import assert_no_fallback
from .watches import Drafts


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


def test_eagle(vllm_runner, target, make_prompt, eagle_head: Path):
    """Output and drafts with chunked prompts."""
    requests = [Request(make_prompt(length, 0), 16) for length in (2, 17, 63, 200)]
    spec = {"model": str(eagle_head), "method": "eagle", "num_speculative_tokens": 3}
    with vllm_runner(
        speculative_config=spec,
        max_model_len=320,
        max_num_seqs=4,
        max_num_batched_tokens=40,
    ) as llm:
        assert llm.call(drafter_name) == "EagleDrafter"
        assert_no_fallback(llm.log, "eagle", 3, 1)
        llm.watch(Drafts)
        served = llm.generate(requests)
    assert_output_matches(target, requests, served)
    texts, oracle = served.texts(requests), EagleOracle(eagle_head, target)
    assert compare_drafts(served.drafts, texts, oracle, width=1) > 20
    assert served.count("num_accepted_tokens") > 0
