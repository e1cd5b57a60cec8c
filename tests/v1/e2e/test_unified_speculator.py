# SPDX-License-Identifier: Apache-2.0
"""Every kind of drafter on Runner V2: the target's own output, the oracle's drafts."""

import json
import re
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import RunEngine
from .draft_oracle import PardOracle, PEagleOracle, load_llama
from .head_oracle import Pard2Oracle
from .kept_drafts import noised

MAX_MODEL_LEN = 320
MODES = {
    "draft": {"method": "draft_model"},
    "pard": {"method": "draft_model"},
    "pard2": {"method": "draft_model"},
    "eagle3": {"method": "eagle3"},
    "peagle": {"method": "eagle3"},
}
PARALLEL = ("pard", "pard2", "peagle")
# The last one ends exactly at max_model_len.
LENGTHS = {1: 20, 2: 20, 3: 20, 16: 20, 17: 20, 63: 20, 128: 20, 300: 20}
# Name of an engine: what it is started with. "ahead" schedules steps before the last
# one's tokens are known: placeholders for drafts, some for none that were made. The
# token budget of "tiny" cuts prompts into chunks, and its KV cache holds one request of
# the longest there can be.
ENGINES: dict[str, dict[str, Any]] = {
    "ahead": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "async_scheduling": True,
    },
    "tiny": {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "block_size": 32,
        "num_gpu_blocks_override": 1 + MAX_MODEL_LEN // 32,
    },
    "alone": {"max_num_seqs": 1, "max_num_batched_tokens": 320},
}
SCENARIOS = {
    "ahead": ("lengths", "again", "aborts"),
    "tiny": ("lengths", "aborts", "preempted"),
    "alone": ("lengths",),
}
DRAFTS = {"ahead": 7, "tiny": 15, "alone": 1}
TINY_WIDTH = 4  # four passes, the last one narrower
SEEDED = 1  # of "aborts", the request that is sampled; drafts are greedy all the same
SAMPLING = {"seed": 3, "temperature": 0.8}


@pytest.fixture(scope="module")
def scenarios(make_prompt) -> dict[str, list[dict[str, Any]]]:
    lengths = [
        {"prompt": make_prompt(length, 0), "max_tokens": tokens}
        for length, tokens in LENGTHS.items()
    ]
    aborted = [
        {"prompt": make_prompt(40, seed), "max_tokens": 32, "abort_after": 3 + 4 * seed}
        for seed in range(4)
    ]
    kept = [{"prompt": make_prompt(40, 9 + i), "max_tokens": 24} for i in range(4)]
    mixed = [request for pair in zip(aborted, kept, strict=True) for request in pair]
    mixed[SEEDED]["sampling"] = SAMPLING
    # Two of them fit into the KV cache of "tiny" when they start, but not to the end.
    growing = [{"prompt": make_prompt(120, 70 + i), "max_tokens": 60} for i in range(3)]
    return {
        "lengths": lengths,
        "again": lengths,
        "aborts": mixed,
        "preempted": growing,
    }


@pytest.fixture(scope="module")
def expected(run_engine: RunEngine, models, scenarios) -> dict[str, list[list[int]]]:
    """The target alone, on Runner V1's native kernels, but what has a seed."""
    whole = {
        name: [{k: r[k] for k in ("prompt", "max_tokens")} for r in requests]
        for name, requests in scenarios.items()
    }
    result = run_engine(whole, "V1", max_model_len=MAX_MODEL_LEN, max_num_seqs=8)
    wanted = {name: found["tokens"] for name, found in result["scenarios"].items()}
    seeded = seeded_answer(models, scenarios["aborts"][SEEDED])
    assert seeded != wanted["aborts"][SEEDED]
    wanted["aborts"][SEEDED] = seeded
    return wanted


@torch.inference_mode()
def seeded_answer(models: Path, request: dict[str, Any]) -> list[int]:
    """What the target draws by the keys of its own positions, in plain PyTorch."""
    target, known = load_llama(models / "target"), list(request["prompt"])
    for position in range(len(known) - 1, len(known) - 1 + request["max_tokens"]):
        logits = target(torch.tensor([known])).logits[0, -1]
        known.append(int(noised(logits, position=position, **SAMPLING).argmax()))
    return known[len(request["prompt"]) :]


def speculative(models, mode: str, drafts: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(models / mode),
        "num_speculative_tokens": drafts,
        **MODES[mode],
        **more,
    }


def assert_same_output(result: dict[str, Any], expected: dict[str, Any]) -> None:
    """The target's own tokens, from a drafter of ours, and no block kept.

    Of an aborted request, those that came before.
    """
    assert result["drafter"].endswith("Drafter")
    for name, found in result["scenarios"].items():
        answers = zip(found["tokens"], found["aborted"], strict=True)
        for (tokens, aborted), wanted in zip(answers, expected[name], strict=True):
            assert tokens == (wanted[: len(tokens)] if aborted else wanted)
    assert result["leaked_blocks"] == 0


def assert_no_fallback(log: str, method: str, drafts: int, width: int) -> None:
    """The log says which speculator runs, and of no other that stands in for it."""
    lines = log.splitlines()
    passes = -(-drafts // width)
    for said in (
        f"method {method}, {drafts} tokens a step, {width} a pass, mask token",
        f"Unified speculator: passes per step {passes}, ",
    ):
        assert sum(said in line for line in lines) == 1
    assert sum("Using V2 Model Runner" in line for line in lines) == 1
    gave_up = [
        line
        for line in lines
        if re.search(r"fall(s|ing)? ?back|V1 model runner|Model Runner V1", line, re.I)
        # The CPU's attention has no metadata that a CUDA graph could refresh.
        and "rebuilding attention metadata" not in line
    ]
    assert gave_up == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_is_the_targets(
    mode: str, engine: str, run_engine: RunEngine, models, scenarios, expected
):
    """Ragged prompts, chunked ones, cache hits, aborts, and the context's end.

    With "tiny", also preemption, and batches of an idle data-parallel rank between
    the steps.
    """
    is_tiny, method, drafts = engine == "tiny", MODES[mode]["method"], DRAFTS[engine]
    width, more = 1, {}
    if mode in PARALLEL:
        width = TINY_WIDTH if is_tiny else drafts
        more = {"parallel_drafting_width": width} if is_tiny else {}
    result = run_engine(
        {name: scenarios[name] for name in SCENARIOS[engine]},
        speculative_config=speculative(models, mode, drafts, **more),
        max_model_len=MAX_MODEL_LEN,
        idle_every=7 if is_tiny else 0,
        record_drafts=is_tiny and mode in PARALLEL,
        **ENGINES[engine],
    )
    assert (result["scheduler"] == "AsyncScheduler") == (engine == "ahead")
    assert_same_output(result, expected)
    assert_no_fallback(result["log"], method, drafts, width)
    for name, found in result["scenarios"].items():
        assert found["counters"]["num_accepted_tokens"][0] > 0
        assert sum(found["aborted"]) == (4 if name == "aborts" else 0)
    if is_tiny:
        assert result["scenarios"]["preempted"]["counters"]["num_preemptions"][0] > 0
        assert result["idle_batches"] > 15
        assert result["touched_kv"] == 0
    if is_tiny and mode in PARALLEL:
        assert_drafts_are_the_oracles(result, mode, models, scenarios)


def assert_drafts_are_the_oracles(
    result: dict[str, Any], mode: str, models: Path, scenarios: dict[str, Any]
) -> None:
    """Blocks of masks in several passes, against plain PyTorch, token for token."""
    if mode == "pard":
        oracle = PardOracle(models / "pard")
    elif mode == "pard2":
        oracle = pard2_oracle(models)
    else:
        oracle = PEagleOracle(models / "peagle", models / "target")
    compared = 0
    for name, found in result["scenarios"].items():
        texts = [
            request["prompt"] + tokens
            for request, tokens in zip(scenarios[name], found["tokens"], strict=True)
        ]
        for request, known, drafts in found["drafts"][::4]:
            text = texts[int(request)]
            count = min(len(drafts), MAX_MODEL_LEN - known)
            if known > len(text) or count < 1:
                continue  # past the last token kept, or past max_model_len
            assert drafts[:count] == oracle.drafts(text[:known], count, TINY_WIDTH)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("mode", ["pard", "peagle"])
def test_smallest_token_budget(
    mode: str, run_engine: RunEngine, models, scenarios, expected
):
    """Every draft batch is wider than the target's budget, and the last is widest."""
    short = {"lengths": scenarios["lengths"][:4]}
    result = run_engine(
        short,
        speculative_config=speculative(models, mode, 7),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=4,
    )
    assert_same_output(result, {"lengths": expected["lengths"][:4]})


@pytest.mark.parametrize("mode", ["draft", "pard"])
def test_draft_context_shorter_than_the_targets(
    mode: str, run_engine: RunEngine, models, scenarios, expected
):
    """Past the draft model's context the request goes on, and nothing is drafted."""
    lengths = scenarios["lengths"]
    result = run_engine(
        {"lengths": lengths, "past": lengths[-2:]},
        speculative_config=speculative(models, mode, 7, max_model_len=72),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
    )
    assert_same_output(
        result, {"lengths": expected["lengths"], "past": expected["lengths"][-2:]}
    )
    drafts = {
        name: found["counters"]["num_draft_tokens"][0]
        for name, found in result["scenarios"].items()
    }
    assert drafts["lengths"] > 0
    assert drafts["past"] == 0


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


def test_eagle(run_engine: RunEngine, scenarios, expected, eagle_head: Path):
    """Prompts in chunks, and acceptance by position as Runner V1's."""
    spec = {"model": str(eagle_head), "method": "eagle", "num_speculative_tokens": 3}
    requests = {"together": scenarios["lengths"], "alone": scenarios["lengths"][5:6]}
    results = {
        runner: run_engine(
            requests,
            runner,
            speculative_config=spec,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=40,
            enable_prefix_caching=False,
        )
        for runner in ("V1", "V2")
    }
    lengths = expected["lengths"]
    assert results["V2"]["drafter"] == "EagleDrafter"
    assert_same_output(results["V2"], {"together": lengths, "alone": lengths[5:6]})
    assert_no_fallback(results["V2"]["log"], "eagle", 3, 1)
    rates = {runner: acceptance_rates(result) for runner, result in results.items()}
    for batch in ("alone", "together"):
        assert rates["V2"][batch] == pytest.approx(rates["V1"][batch], abs=0.03)
    assert rates["V1"]["together"][0] > 0.05  # it drafts something


@pytest.mark.parametrize("mode", MODES)
def test_acceptance_by_position_is_the_oracles(
    mode: str, run_engine: RunEngine, models, make_prompt
):
    """Runner V1 drafts with other code: equal acceptance means equal drafts.

    PARD-2, which it lacks, is held against plain PyTorch. Runner V2 replays its passes,
    as it does on a GPU.
    """
    requests = [{"prompt": make_prompt(48, 50 + i), "max_tokens": 48} for i in range(8)]
    scenarios = {f"alone {i}": [request] for i, request in enumerate(requests[:4])}
    scenarios["together"] = requests
    spec = speculative(models, mode, 7, parallel_drafting=mode in PARALLEL)
    engine = {
        "speculative_config": spec,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 1024,
        "enable_prefix_caching": False,
    }
    if mode == "pard2":
        wanted = replayed_rates(pard2_oracle(models), requests, run_engine)
    else:
        wanted = acceptance_rates(run_engine(scenarios, "V1", **engine))
    result = run_engine(scenarios, "V2", record_graphs=True, **engine)
    assert result["replays"]["first"] > 0
    assert (result["replays"]["later"] > 0) == (mode not in PARALLEL)
    found = acceptance_rates(result)
    for batch in ("alone", "together"):
        assert found[batch] == pytest.approx(wanted[batch], abs=0.03)
        assert wanted[batch][0] > 0.3  # the drafter is a trained one


def pard2_oracle(models: Path) -> Pard2Oracle:
    return Pard2Oracle(models / "pard2", load_llama(models / "target"), (-1, -3))


def replayed_rates(
    oracle: Pard2Oracle, requests: list[dict[str, Any]], run_engine: RunEngine
) -> dict[str, list[float]]:
    """As `acceptance_rates`, of an oracle's drafts for what the target alone says."""
    # Beyond a request's end too: its last drafts are verified, whatever of them counts.
    longer = [
        request | {"max_tokens": request["max_tokens"] + 8} for request in requests
    ]
    alone = run_engine({"text": longer}, "V1", max_model_len=MAX_MODEL_LEN)
    texts = alone["scenarios"]["text"]["tokens"]
    accepted = [
        replayed(oracle, request["prompt"], text, request["max_tokens"])
        for request, text in zip(requests, texts, strict=True)
    ]
    rates = {}
    for batch, which in {"alone": accepted[:4], "together": accepted}.items():
        counts = list(chain.from_iterable(which))
        rates[batch] = [sum(n > k for n in counts) / len(counts) for k in range(7)]
    return rates


def replayed(
    oracle: Pard2Oracle, prompt: list[int], text: list[int], num_tokens: int
) -> list[int]:
    """How many of seven drafts each step accepts; the first token takes no step."""
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
