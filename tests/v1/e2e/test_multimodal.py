# SPDX-License-Identifier: Apache-2.0
"""Drafts for multimodal targets, with images and text in the prompt, or text only."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn
from transformers import AutoModelForImageTextToText

from .hooks import drafter_name
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
    assert_output_matches,
    compare_drafts,
)
from .recorded import Replays
from .runner import Request, Served
from .test_unified_speculator import SAMPLING, only_fast
from .watches import Drafts
from .without_torchvision import register_model

TARGETS = {"llava": write_llava, "qwen-vl": write_qwen_vl}
TAPPED = (1, 3, 5)
# Prompts are chunked; chunks end within images and between them.
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
SEEDED, TEXT = 3, 1  # indices of the requests that are sampled, and without images


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


Sides = list[tuple[int, int]]  # rows and columns of a prompt's images
SIDES: dict[str, list[Sides]] = {
    "llava": [[(4, 4)], [], [(4, 4), (4, 4)], [(4, 4)]],
    "qwen-vl": [[(2, 3)], [], [(3, 3), (4, 2)], [(6, 6)]],
}


def images_of(name: str, number: int) -> list[Any]:
    return [picture(*side, number + i) for i, side in enumerate(SIDES[name][number])]


@pytest.fixture
def requests_of(make_prompt) -> Callable[..., tuple[list[Request], list[Request]]]:
    """Requests of a target with one image, two images, or none.

    In the second list prompts have as many tokens for each image as it has cells.
    """

    def make(name: str, number: int, max_tokens: int, is_whole: bool) -> Request:
        text, sides = make_prompt(24 + 9 * number, number), SIDES[name][number]
        prompt, each = [], len(text) // (len(sides) + 1)
        for i, (rows, columns) in enumerate(sides):
            cells = rows * columns if is_whole else 1
            prompt += [*text[i * each : (i + 1) * each], START, *[IMAGE] * cells, END]
        prompt += text[len(sides) * each :]
        if sides and not is_whole:
            shown = {"image": images_of(name, number)}
            prompt = {"prompt_token_ids": prompt, "multi_modal_data": shown}
        sampling = SAMPLING if number == SEEDED else {}
        return Request(prompt, max_tokens, **sampling)

    def requests(
        name: str, max_tokens: int = 20
    ) -> tuple[list[Request], list[Request]]:
        asked, whole = (
            [make(name, i, max_tokens, is_whole) for i in range(len(SIDES[name]))]
            for is_whole in (False, True)
        )
        return asked, whole

    return requests


def assert_each_matches(
    name: str, target: nn.Module, whole: list[Request], served: Served
) -> None:
    for number, one in enumerate(whole):
        alone = Served(served.outputs[number : number + 1], {})
        assert_output_matches(Seen(target, images_of(name, number)), [one], alone)


@pytest.fixture
def start(vllm_runner, target_of):
    def start(name: str, **given: Any):
        folder = target_of(name)
        register = partial(register_model, str(folder))
        llm = vllm_runner(folder, setup=[register], **ENGINE, **given)
        assert llm.call(drafter_name).endswith("Drafter")
        assert "Drafting falls back" not in llm.log
        return llm

    return start


def load(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )


MODES = {"draft": 1, "pard": 7, "pard2": 7, "eagle3": 1, "peagle": 7}  # drafts per pass
CASES = [f"{target}:{mode}" for target in TARGETS for mode in MODES]
FAST = ("qwen-vl:eagle3",)


def oracle_for(case: str, folder: Path, target: Seen, sides: Sides):
    name, mode = case.split(":")
    if mode == "pard2":
        return Pard2Oracle(folder, target, (-1, -3))
    if mode not in ("eagle3", "peagle"):
        return ModelOracle(folder, target)
    if name == "qwen-vl":
        return MRopeHeadOracle(folder, target, TAPPED, sides=sides)
    return HeadOracle(folder, target, TAPPED)


@pytest.fixture
def assert_drafts_match(start, target_of, requests_of):
    """
    Args:
        oracle_of: makes an oracle for a request, from the target with its images, and
            their sides.
        width: drafts per pass.
    """

    def check(
        name: str,
        spec: dict[str, Any],
        oracle_of: Callable[[Seen, Sides], Any],
        width: int,
    ) -> None:
        (asked, whole), target = requests_of(name), load(target_of(name))
        with start(name, graphs=True, speculative_config=spec) as llm:
            llm.watch(Drafts)
            served = llm.generate(asked)
            assert llm.found(Replays)["first"] > 0
        assert_each_matches(name, target, whole, served)
        texts = served.texts(whole)
        for number in range(len(whole)):
            oracle = oracle_of(
                Seen(target, images_of(name, number)), SIDES[name][number]
            )
            drafts = [each for each in served.drafts if each[0] == number]
            assert compare_drafts(drafts, texts, oracle, width, every=3) > 1
        assert served.count("num_accepted_tokens") > 0

    return check


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_and_output(case, models, heads, assert_drafts_match):
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
    oracle_of = partial(oracle_for, case, folder)
    assert_drafts_match(name, spec, oracle_of, MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_embeddings_of_images(name, models, tmp_path, assert_drafts_match):
    """A head that takes embeddings is fed the target's, shifted like the tokens."""
    folder = write_seeing_head(models, tmp_path / "head")
    spec = {"model": str(folder), "method": "eagle", "num_speculative_tokens": 3}
    assert_drafts_match(
        name, spec, lambda target, sides: SeeingEagleOracle(folder, target), 1
    )


TREES = [f"{target}:{mode}" for target in TARGETS for mode in ("pard", "peagle")]


@pytest.mark.slow
@pytest.mark.parametrize("case", TREES)
def test_trees(case, models, target_of, heads, start, requests_of):
    """Rows of the same depth share their M-RoPE positions."""
    name, mode = case.split(":")
    folder = heads[mode] if case == "qwen-vl:peagle" else models / mode
    spec = {
        "model": str(folder),
        "method": "eagle3" if mode in heads else "draft_model",
        "num_speculative_tokens": 4,
        "draft_tree": 15,
    }
    asked, whole = requests_of(name)
    with start(name, speculative_config=spec) as llm:
        assert "Draft trees are not used" not in llm.log
        served = llm.generate(asked)
    assert_each_matches(name, load(target_of(name)), whole, served)
    assert served.counters["num_accepted_tree_nodes"][1] > 0


@pytest.mark.slow
def test_multimodal_draft_model(target_of, start, requests_of):
    """As its own draft model the target gets only tokens, which suffice for text."""
    name, folder = "qwen-vl", str(target_of("qwen-vl"))
    spec = {"model": folder, "method": "draft_model", "num_speculative_tokens": 3}
    # The first token and five whole steps: no accepted draft is cut off at the end.
    asked, whole = requests_of(name, max_tokens=21)
    with start(name, speculative_config=spec) as llm:
        alone, served = llm.generate(asked[TEXT : TEXT + 1]), llm.generate(asked)
    target = load(target_of(name))
    assert_output_matches(Seen(target, []), whole[TEXT : TEXT + 1], alone)
    assert_each_matches(name, target, whole, served)
    assert alone.count("num_accepted_tokens") == alone.count("num_draft_tokens")
