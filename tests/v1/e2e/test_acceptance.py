# SPDX-License-Identifier: Apache-2.0
"""Acceptance by position is that of Runner V1, which drafts with other code.

PARD-2, which it lacks, is held against plain PyTorch.
"""

import json
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import RunEngine
from .oracle import Pard2Oracle, greedy_answer
from .test_unified_speculator import (
    MODES,
    PARALLEL,
    assert_no_fallback,
    assert_output_is_the_targets,
    oracle_of,
    speculative,
)

ENGINE = {"max_model_len": 320, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def eagle_head(models, tmp_path_factory) -> Path:
    """An EAGLE-1 head made of the target's last layer; it drafts badly, but drafts."""
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
    save_file(head, folder / "model.safetensors")
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def requests(make_prompt) -> list[dict[str, Any]]:
    return [{"prompt": make_prompt(48, 50 + i), "max_tokens": 48} for i in range(8)]


@pytest.fixture(scope="module")
def scenarios(requests) -> dict[str, list[dict[str, Any]]]:
    alone = {f"alone {i}": [request] for i, request in enumerate(requests[:4])}
    return alone | {"together": requests}


def test_eagle(run_engine: RunEngine, target, make_prompt, eagle_head: Path):
    """Prompts in chunks."""
    requests = [
        {"prompt": make_prompt(length, 0), "max_tokens": 16}
        for length in (2, 17, 63, 200)
    ]
    result = run_engine({"together": requests}, **eagle(eagle_head))
    assert result["drafter"] == "EagleDrafter"
    assert_output_is_the_targets(result, target, {"together": requests})
    assert_no_fallback(result["log"], "eagle", 3, 1)
    assert result["scenarios"]["together"]["counters"]["num_accepted_tokens"][0] > 0


def eagle(head: Path) -> dict[str, Any]:
    spec = {"model": str(head), "method": "eagle", "num_speculative_tokens": 3}
    chunks = {"max_num_seqs": 4, "max_num_batched_tokens": 40}
    return {"speculative_config": spec, **ENGINE, **chunks}


@pytest.mark.slow
def test_eagle_accepts_as_runner_v1_does(
    run_engine: RunEngine, scenarios, eagle_head: Path
):
    wanted, found = (
        acceptance_rates(run_engine(scenarios, runner, **eagle(eagle_head)))
        for runner in ("V1", "V2")
    )
    for batch in ("alone", "together"):
        assert found[batch] == pytest.approx(wanted[batch], abs=0.03)
    assert wanted["together"][0] > 0.05  # it drafts something


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_acceptance_by_position_is_the_oracles(
    mode: str, run_engine: RunEngine, models, target, requests, scenarios
):
    """Runner V2 replays its passes, as it does on a GPU."""
    spec = speculative(models, mode, 7, parallel_drafting=mode in PARALLEL)
    engine = {
        "speculative_config": spec,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        **ENGINE,
    }
    if mode == "pard2":
        wanted = replayed_rates(oracle_of(mode, models, target), requests)
    else:
        wanted = acceptance_rates(run_engine(scenarios, "V1", **engine))
    result = run_engine(scenarios, "V2", record_graphs=True, **engine)
    assert result["replays"]["first"] > 0
    assert (result["replays"]["later"] > 0) == (mode not in PARALLEL)
    found = acceptance_rates(result)
    for batch in ("alone", "together"):
        assert found[batch] == pytest.approx(wanted[batch], abs=0.03)
        assert wanted[batch][0] > 0.3  # the drafter is a trained one


def replayed_rates(
    oracle: Pard2Oracle, requests: list[dict[str, Any]]
) -> dict[str, list[float]]:
    """As `acceptance_rates`, of an oracle's drafts for what the target alone says."""
    accepted = [
        replayed(oracle, request["prompt"], request["max_tokens"])
        for request in requests
    ]
    rates = {}
    for batch, which in {"alone": accepted[:4], "together": accepted}.items():
        counts = list(chain.from_iterable(which))
        rates[batch] = [sum(n > k for n in counts) / len(counts) for k in range(7)]
    return rates


def replayed(oracle: Pard2Oracle, prompt: list[int], num_tokens: int) -> list[int]:
    """How many of seven drafts each step accepts; the first token takes no step."""
    # Beyond its end too: the last drafts are verified, whatever of them counts.
    text = greedy_answer(oracle.target, prompt, num_tokens + 8)
    counts, at = [], 1
    while at < num_tokens:
        drafts = oracle.drafts(prompt + text[:at], 7, 7)
        pairs = zip(drafts, text[at:], strict=False)
        counts.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
        at += counts[-1] + 1
    return counts


def acceptance_rates(result: dict[str, Any]) -> dict[str, list[float]]:
    """Share of drafts accepted at each position, for batches of one and of eight."""
    rates = {}
    for batch in ("alone", "together"):
        found = [
            scenario["counters"]
            for name, scenario in result["scenarios"].items()
            if name.startswith(batch)
        ]
        drafts = sum(counters["num_drafts"][0] for counters in found)
        accepted = zip(*(c["num_accepted_tokens_per_pos"] for c in found), strict=True)
        rates[batch] = [sum(counts) / drafts for counts in accepted]
    return rates
