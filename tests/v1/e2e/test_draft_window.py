# SPDX-License-Identifier: Apache-2.0
"""Drafters with a window: output equals the target's, drafts those of the window."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import RunEngine
from .oracle import HeadOracle, assert_greedy_output_matches
from .test_unified_speculator import MODES, speculative

pytestmark = pytest.mark.slow

DRAFTS, TOKENS, BLOCK, WINDOW, MAX_MODEL_LEN = 5, 64, 32, 64, 768
LENGTHS = (20, 150, 600)


class WindowedHead(HeadOracle):
    """A head of one layer that attends to the first block and a window.

    Attributes:
        begin: first token of the window.
    """

    begin = 0

    def _layer(
        self, number: int, hidden: torch.Tensor, normed: torch.Tensor
    ) -> torch.Tensor:
        layer, places = self.layers[number], torch.arange(len(hidden))
        is_shown = (places < BLOCK) | (places >= self.begin)
        mask = (places <= places[:, None]) & (is_shown | (places == places[:, None]))
        attended, _ = layer.self_attn(
            normed[None],
            position_embeddings=self.rope(hidden, places[None]),
            attention_mask=torch.zeros(mask.shape).masked_fill(~mask, -1e9)[None, None],
        )
        hidden = hidden + attended[0]
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def run(run_engine, models, make_prompt, mode: str, **more: Any) -> dict[str, Any]:
    requests = [
        {"prompt": make_prompt(length, 5), "max_tokens": TOKENS} for length in LENGTHS
    ]
    result = run_engine(
        {"all": requests},
        speculative_config=speculative(models, mode, DRAFTS, **more),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        block_size=BLOCK,
        enable_prefix_caching=False,
        record_drafts=True,
        record_graphs=True,
    )
    assert result["replays"]["first"] > 0
    prompts = [request["prompt"] for request in requests]
    return result["scenarios"]["all"] | {"prompts": prompts}


def possible_begins(known: int, prompt: int) -> set[int]:
    """Possible begins of the window: they depend on the number of valid tokens of the
    previous step. A prompt is a single step."""
    if known == prompt + 1:
        return {0}
    slots = range(1, DRAFTS + 2)
    firsts = [known - 1 - valid for valid in slots]
    return {max(first + 1 - WINDOW, 0) // BLOCK * BLOCK for first in firsts}


def test_drafts_match_windowed_oracle(
    run_engine: RunEngine, models, target, make_prompt
):
    """The keys of a head of one layer only depend on its inputs, not on the window."""
    found = run(run_engine, models, make_prompt, "eagle3", draft_window=WINDOW)
    assert_greedy_output_matches(target, found["prompts"], found["tokens"])
    oracle, whole = (
        kind(models / "eagle3", target, (1, 3, 5))
        for kind in (WindowedHead, HeadOracle)
    )
    compared = differing = 0
    for request, known, drafted in found["drafts"][::3]:
        prompt = found["prompts"][int(request)]
        text = prompt + found["tokens"][int(request)]
        if known > len(text):
            continue
        wanted = []
        for oracle.begin in possible_begins(known, len(prompt)):
            wanted.append(oracle.drafts(text[:known], len(drafted), 1))
        assert drafted in wanted, f"request {request} after {known} tokens"
        compared += 1
        differing += drafted != whole.drafts(text[:known], len(drafted), 1)
    assert compared > 10 and differing > 0


@pytest.mark.parametrize("mode", MODES)
def test_window_of_whole_context_changes_nothing(
    mode: str, run_engine: RunEngine, models, target, make_prompt
):
    found = [
        run(run_engine, models, make_prompt, mode, **window)
        for window in ({}, {"draft_window": MAX_MODEL_LEN}, {"draft_window": WINDOW})
    ]
    whole, same, narrow = found
    assert whole["drafts"] == same["drafts"]
    assert whole["drafts"] != narrow["drafts"]
    for each in found:
        assert_greedy_output_matches(target, each["prompts"], each["tokens"])
        assert each["counters"]["num_accepted_tokens"][0] > 0


LONG, DEEP_LAYERS = 1024, 6


@pytest.fixture(scope="module")
def deep_models(models, tmp_path_factory):
    """The bundled models, but PARD-2 with as many layers as the target: layers of a KV
    cache group share blocks. What is added changes no hidden state."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "draft").symlink_to(models / "draft")
    deep = Path(shutil.copytree(models / "pard2", folder / "pard2"))
    config = json.loads((deep / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config["num_hidden_layers"] = DEEP_LAYERS
    (deep / "config.json").write_text(json.dumps(config))
    weights = load_file(deep / "model.safetensors")
    of_last = {n: w for n, w in weights.items() if f".layers.{last}." in n}
    for number in range(last + 1, DEEP_LAYERS):
        for name, weight in of_last.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(weight) if adds else weight.clone()
            weights[name.replace(f".{last}.", f".{number}.")] = copy
    save_file(weights, deep / "model.safetensors")
    return folder


# Pools that are so small that blocks are used again soon after they were given back.
GIVEN_BACK = {
    "draft": {"num_gpu_blocks_override": 126},
    "draft-turns": {"num_gpu_blocks_override": 132},
    "pard2": {"num_gpu_blocks_override": 52, "async_scheduling": True},
    "pard2-tree": {"num_gpu_blocks_override": 54},
}
SPECULATIVE = {
    "draft-turns": {"num_speculative_tokens_per_batch_size": "auto"},
    "pard2-tree": {"draft_tree": 15},
}
TURNS = {"made_up_times": True, "drafts_by_turns": [0] * 70 + [3, 3, 5, 0, 3]}
GROUPS = {"draft": "in 4 groups of 2 layers", "pard2": "in 2 groups of 6 layers"}


def run_requests(
    run_engine, models, case: str, scenarios: dict[str, Any], whole: bool, **engine: Any
) -> dict[str, Any]:
    """Results with blocks given back; if `whole`, all are kept.

    Given back, blocks take the same memory, so those of the drafter, whose layers are
    half as large as the target's, have twice as many tokens.
    """
    mode, _, kind = case.partition("-")
    more = SPECULATIVE.get(case, {}) | {"draft_window": WINDOW}
    if whole:
        engine |= {"disable_hybrid_kv_cache_manager": True, "block_size": 2 * BLOCK}
        engine.pop("num_gpu_blocks_override", None)
    result = run_engine(
        scenarios,
        speculative_config=speculative(models, mode, DRAFTS, **more),
        **{"block_size": BLOCK, "max_model_len": LONG, "max_num_seqs": 4} | engine,
        max_num_batched_tokens=128,
        record_drafts=True,
        record_graphs=True,
        **(TURNS if kind == "turns" else {}),
    )
    said = "kept until a request ends: the hybrid" if whole else "given back: it saves"
    assert f"KV cache outside draft_window is {said}" in result["log"]
    assert whole or GROUPS[mode] in result["log"]
    assert result["leaked_blocks"] == 0
    return result


@pytest.mark.parametrize("case", GIVEN_BACK)
def test_giving_blocks_back_changes_no_draft(
    case: str, run_engine: RunEngine, deep_models, target, make_prompt
):
    """With prompts in chunks, rejected drafts, and steps that draft nothing."""
    prompts = [make_prompt(length, 5) for length in LENGTHS]
    prompts += [make_prompt(60, seed) for seed in range(10)]
    asked = [{"prompt": prompt, "max_tokens": 100} for prompt in prompts]
    for number, short in enumerate(asked[len(LENGTHS) :]):
        short |= {"max_tokens": 8, "arrives": 8 * number}
    given_back, kept = (
        run_requests(
            run_engine,
            deep_models,
            case,
            {"all": asked},
            whole,
            enable_prefix_caching=False,
            **GIVEN_BACK[case],
        )["scenarios"]["all"]
        for whole in (False, True)
    )
    assert_greedy_output_matches(target, prompts, given_back["tokens"])
    assert given_back["counters"]["num_preemptions"] == [0]
    assert given_back["counters"]["num_accepted_tokens"][0] > 20
    assert given_back["drafts"] == kept["drafts"]


@pytest.mark.parametrize("mode", GROUPS)
def test_long_prompts_are_found_again(
    mode: str, run_engine: RunEngine, deep_models, target, make_prompt
):
    """With the first block and the window, and the same drafts follow."""
    prompts = [make_prompt(length, 5) for length in LENGTHS]
    asked = [{"prompt": prompt, "max_tokens": 40} for prompt in prompts]
    scenarios = {"first": asked, "again": asked}
    given_back, kept = (
        run_requests(run_engine, deep_models, mode, scenarios, whole)["scenarios"]
        for whole in (False, True)
    )
    for name in scenarios:
        assert_greedy_output_matches(target, prompts, given_back[name]["tokens"])
        assert given_back[name]["drafts"] == kept[name]["drafts"]
    hits = [
        found["again"]["counters"]["prefix_cache_hits"][0]
        for found in (given_back, kept)
    ]
    assert hits[0] == hits[1] == 128 + 576


@pytest.mark.parametrize("mode", GROUPS)
def test_a_request_needs_only_its_window(
    mode: str, run_engine: RunEngine, deep_models, target, make_prompt
):
    """A pool for all blocks of the target but not of the drafter serves a request up to
    `max_model_len`; two at a time are preempted."""
    window = 5  # blocks: the first one, and the window's with a chunk of the prompt
    blocks = (LONG // BLOCK) * int(GROUPS[mode].split()[1]) - LONG // BLOCK
    lengths = {"alone": [(900, LONG - 900)], "two": [(430, 200), (420, 200)]}
    prompts = {
        name: [make_prompt(length, 7) for length, _ in each]
        for name, each in lengths.items()
    }
    scenarios = {
        name: [
            {"prompt": prompt, "max_tokens": tokens}
            for prompt, (_, tokens) in zip(prompts[name], lengths[name], strict=True)
        ]
        for name in lengths
    }
    found = run_requests(
        run_engine,
        deep_models,
        mode,
        scenarios,
        whole=False,
        num_gpu_blocks_override=1 + blocks + window,
        async_scheduling=False,
    )["scenarios"]
    for name, each in found.items():
        assert_greedy_output_matches(target, prompts[name], each["tokens"])
        assert each["counters"]["num_accepted_tokens"][0] > 20
    assert found["alone"]["counters"]["num_preemptions"] == [0]
    assert found["two"]["counters"]["num_preemptions"][0] > 0
