# SPDX-License-Identifier: Apache-2.0
"""Drafts for multimodal targets, with images and text in the prompt, or text only."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn
from transformers import AutoModelForImageTextToText

from .conftest import RunEngine
from .images import END, IMAGE, START, picture
from .multimodal_models import (
    write_llava,
    write_mrope_head,
    write_qwen_vl,
    write_seeing_head,
)
from .multimodal_oracle import MRopeHeadOracle, SeeingEagleOracle, Seen
from .oracle import (
    HeadOracle,
    ModelOracle,
    Pard2Oracle,
    choices,
    compare_drafts,
    seeded_choices,
)
from .test_unified_speculator import SAMPLING, only_fast

TARGETS = {"llava": write_llava, "qwen-vl": write_qwen_vl}
TAPPED = (1, 3, 5)
# Prompts are chunked; chunks end within images and between them.
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
SEEDED = 3  # index of the request that is sampled


@pytest.fixture(scope="module")
def target_of(models: Path, tmp_path_factory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("multimodal")
    return cache(lambda name: TARGETS[name](models, folder / name))


@pytest.fixture(scope="module")
def heads(models: Path, tmp_path_factory) -> dict[str, Path]:
    """The bundled heads, with configs for M-RoPE positions."""
    folder = tmp_path_factory.mktemp("heads")
    names = ("eagle3", "peagle")
    return {name: write_mrope_head(models / name, folder / name) for name in names}


@pytest.fixture(scope="module")
def requests(make_prompt) -> dict[str, list[dict[str, Any]]]:
    """Requests with one image, two images, or none."""

    def make(number: int, *sides: tuple[int, int]) -> dict[str, Any]:
        text = make_prompt(24 + 9 * number, number)
        prompt, each = [], len(text) // (len(sides) + 1)
        for i, _ in enumerate(sides):
            prompt += [*text[i * each : (i + 1) * each], START, IMAGE, END]
        prompt += text[len(sides) * each :]
        asked = {"prompt": prompt, "max_tokens": 20}
        if sides:
            asked["images"] = [(*side, number + i) for i, side in enumerate(sides)]
        return asked | ({"sampling": SAMPLING} if number == SEEDED else {})

    return {
        "llava": [make(0, (4, 4)), make(1), make(2, (4, 4), (4, 4)), make(3, (4, 4))],
        "qwen-vl": [make(0, (2, 3)), make(1), make(2, (3, 3), (4, 2)), make(3, (6, 6))],
    }


def whole_prompt(request: dict[str, Any]) -> list[int]:
    """The prompt with as many tokens for each image as it has cells."""
    cells = (rows * columns for rows, columns, _ in request.get("images", ()))
    one_by_one = (
        [IMAGE] * next(cells) if t == IMAGE else [t] for t in request["prompt"]
    )
    return [token for tokens in one_by_one for token in tokens]


def seen(target: nn.Module, request: dict[str, Any]) -> Seen:
    return Seen(target, [picture(*image) for image in request.get("images", ())])


def assert_output_matches_target(
    found: dict[str, Any], target: nn.Module, requests: list[dict[str, Any]]
) -> list[list[int]]:
    """Returns the token ids of the requests, prompt and output."""
    texts = []
    for request, answer in zip(requests, found["tokens"], strict=True):
        prompt, alone = whole_prompt(request), seen(target, request)
        text = prompt + answer
        if "sampling" in request:
            assert answer == seeded_choices(alone, text, len(prompt), **SAMPLING)
        else:
            assert answer == choices(alone, text)[len(prompt) - 1 : -1]
        texts.append(text)
    return texts


def run(
    run_engine: RunEngine, target: Path, requests: Any, **given: Any
) -> dict[str, Any]:
    scenarios = {"together": requests}
    result = run_engine(scenarios, model=target, is_multimodal=True, **ENGINE, **given)
    assert result["leaked_blocks"] == 0
    assert result["drafter"].endswith("Drafter")
    assert "Drafting falls back" not in result["log"]
    return result


def load(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )


MODES = {"draft": 1, "pard": 7, "pard2": 7, "eagle3": 1, "peagle": 7}  # drafts per pass
CASES = [f"{target}:{mode}" for target in TARGETS for mode in MODES]
FAST = ("qwen-vl:eagle3",)


def oracle_for(case: str, folder: Path, target: Seen, sides: list[tuple[int, int]]):
    name, mode = case.split(":")
    if mode == "pard2":
        return Pard2Oracle(folder, target, (-1, -3))
    if mode not in ("eagle3", "peagle"):
        return ModelOracle(folder, target)
    if name == "qwen-vl":
        return MRopeHeadOracle(folder, target, TAPPED, sides=sides)
    return HeadOracle(folder, target, TAPPED)


def assert_drafts_match_oracle(
    run_engine: RunEngine,
    folder: Path,
    asked: Any,
    spec: dict[str, Any],
    oracle_of: Callable[[Seen, list[tuple[int, int]]], Any],
    width: int,
) -> None:
    """
    Args:
        folder: of the target.
        oracle_of: makes an oracle for a request, from the target with its images, and
            their sides.
        width: drafts per pass.
    """
    recorded = {"record_drafts": True, "record_graphs": True}
    result = run(run_engine, folder, asked, speculative_config=spec, **recorded)
    assert result["replays"]
    found, target = result["scenarios"]["together"], load(folder)
    texts = assert_output_matches_target(found, target, asked)
    for number, request in enumerate(asked):
        sides = [image[:2] for image in request.get("images", ())]
        own = [drafted for drafted in found["drafts"] if drafted[0] == str(number)]
        oracle = oracle_of(seen(target, request), sides)
        assert compare_drafts(own, texts, oracle, width, every=3) > 1
    assert found["counters"]["num_accepted_tokens"][0] > 0


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_and_output(case, run_engine, models, target_of, heads, requests):
    """Drafts equal those of plain PyTorch: heads have M-RoPE positions, and draft
    models process images as placeholder tokens at plain positions."""
    name, mode = case.split(":")
    is_head = mode in heads
    folder = heads[mode] if is_head and name == "qwen-vl" else models / mode
    spec = {
        "model": str(folder),
        "method": "eagle3" if is_head else "draft_model",
        "num_speculative_tokens": 7,
    }
    assert_drafts_match_oracle(
        run_engine,
        target_of(name),
        requests[name],
        spec,
        lambda target, sides: oracle_for(case, folder, target, sides),
        MODES[mode],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_embeddings_of_images(name, run_engine, models, target_of, requests, tmp_path):
    """A head that takes embeddings is fed the target's, shifted like the tokens."""
    folder = write_seeing_head(models, tmp_path / "head")
    spec = {"model": str(folder), "method": "eagle", "num_speculative_tokens": 3}
    assert_drafts_match_oracle(
        run_engine,
        target_of(name),
        requests[name],
        spec,
        lambda target, sides: SeeingEagleOracle(folder, target),
        1,
    )


TREES = [f"{target}:{mode}" for target in TARGETS for mode in ("pard", "peagle")]


@pytest.mark.slow
@pytest.mark.parametrize("case", TREES)
def test_trees(case, run_engine, models, target_of, heads, requests):
    """Rows of the same depth share their M-RoPE positions."""
    name, mode = case.split(":")
    folder = heads[mode] if case == "qwen-vl:peagle" else models / mode
    spec = {
        "model": str(folder),
        "method": "eagle3" if mode in heads else "draft_model",
        "num_speculative_tokens": 4,
        "draft_tree": 15,
    }
    result = run(run_engine, target_of(name), requests[name], speculative_config=spec)
    assert "Draft trees are not used" not in result["log"]
    found = result["scenarios"]["together"]
    assert_output_matches_target(found, load(target_of(name)), requests[name])
    assert found["counters"]["num_accepted_tree_nodes"][1] > 0


@pytest.mark.slow
def test_multimodal_draft_model(run_engine, target_of, requests):
    """As its own draft model the target gets only tokens, which suffice for text."""
    target = str(target_of("qwen-vl"))
    spec = {"model": target, "method": "draft_model", "num_speculative_tokens": 3}
    # The first token and five whole steps: no accepted draft is cut off at the end.
    text = [
        request | {"max_tokens": 21}
        for request in requests["qwen-vl"]
        if "images" not in request
    ]
    for asked in (text, requests["qwen-vl"]):
        result = run(run_engine, target, asked, speculative_config=spec)
        found = result["scenarios"]["together"]
        assert_output_matches_target(found, load(target_of("qwen-vl")), asked)
        accepted = found["counters"]["num_accepted_tokens"][0]
        if asked is text:
            assert accepted == found["counters"]["num_draft_tokens"][0]
