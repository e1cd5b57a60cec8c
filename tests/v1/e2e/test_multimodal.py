# SPDX-License-Identifier: Apache-2.0
"""Drafts for a multimodal target with M-RoPE, with images in the prompt or text only.

`test_targets.py` has more such targets.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn as nn
from transformers import AutoModelForImageTextToText

from .hooks import drafter_name
from .images import END, IMAGE, START, picture
from .multimodal_models import write_mrope_head, write_qwen_vl, write_seeing_head
from .multimodal_oracle import MRopeHeadOracle, SeeingEagleOracle, Seen
from .oracle import (
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
def folder(models: Path, tmp_path_factory) -> Path:
    return write_qwen_vl(models, tmp_path_factory.mktemp("multimodal") / "target")


@pytest.fixture(scope="module")
def target(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )


@pytest.fixture(scope="module")
def heads(models: Path, tmp_path_factory) -> dict[str, Path]:
    """The bundled heads, with configs for M-RoPE positions."""
    folder = tmp_path_factory.mktemp("heads")
    names = ("eagle3", "peagle")
    return {name: write_mrope_head(models / name, folder / name) for name in names}


Sides = list[tuple[int, int]]  # rows and columns of a prompt's images
SIDES: list[Sides] = [[(2, 3)], [], [(3, 3), (4, 2)], [(6, 6)]]  # by request


def images_of(number: int) -> list[Any]:
    return [picture(*side, number + i) for i, side in enumerate(SIDES[number])]


@pytest.fixture
def requests(make_prompt) -> tuple[list[Request], list[Request]]:
    """Requests with one image, two images, or none.

    In the second list prompts have as many tokens for each image as it has cells.
    """

    def make(number: int, is_whole: bool) -> Request:
        text, sides = make_prompt(24 + 9 * number, number), SIDES[number]
        prompt, each = [], len(text) // (len(sides) + 1)
        for i, (rows, columns) in enumerate(sides):
            cells = rows * columns if is_whole else 1
            prompt += [*text[i * each : (i + 1) * each], START, *[IMAGE] * cells, END]
        prompt += text[len(sides) * each :]
        if sides and not is_whole:
            shown = {"image": images_of(number)}
            prompt = {"prompt_token_ids": prompt, "multi_modal_data": shown}
        return Request(prompt, 20, **SAMPLING if number == SEEDED else {})

    asked, whole = (
        [make(number, is_whole) for number in range(len(SIDES))]
        for is_whole in (False, True)
    )
    return asked, whole


MODES = {"draft": 1, "pard": 7, "pard2": 7, "eagle3": 1, "peagle": 7}  # drafts per pass


def spec_of(mode: str, models: Path, heads: dict[str, Path], **more: Any) -> dict:
    method = "eagle3" if mode in heads else "draft_model"
    drafter = heads.get(mode, models / mode)
    return {"model": str(drafter), "method": method, "num_speculative_tokens": 7} | more


def oracle_for(mode: str, drafter: Path, target: Seen, sides: Sides):
    if mode == "pard2":
        return Pard2Oracle(drafter, target, (-1, -3))
    if mode not in ("eagle3", "peagle"):
        return ModelOracle(drafter, target)
    return MRopeHeadOracle(drafter, target, TAPPED, sides=sides)


@pytest.fixture
def serve(vllm_runner, folder: Path, target, requests):
    """Answers the requests, and compares with the target alone.

    Args:
        oracle_of: makes an oracle for a request, from the target with its images, and
            their sides; each draft must be the oracle's.
        width: drafts per pass.
    """

    def run(
        spec: dict[str, Any],
        oracle_of: Callable[[Seen, Sides], Any] | None = None,
        width: int = 1,
    ) -> Served:
        asked, whole = requests
        register = partial(register_model, str(folder))
        given = {"graphs": oracle_of is not None, "speculative_config": spec}
        with vllm_runner(folder, setup=[register], **ENGINE, **given) as llm:
            assert llm.call(drafter_name).endswith("Drafter")
            assert "Drafting falls back" not in llm.log
            assert "Draft trees are not used" not in llm.log
            if oracle_of:
                llm.watch(Drafts)
            served = llm.generate(asked)
            assert not oracle_of or llm.found(Replays)["first"] > 0
        texts = served.texts(whole)
        for number, one in enumerate(whole):
            seen = Seen(target, images_of(number))
            alone = Served(served.outputs[number : number + 1], {})
            assert_output_matches(seen, [one], alone)
            if oracle_of:
                drafts = [each for each in served.drafts if each[0] == number]
                oracle = oracle_of(seen, SIDES[number])
                assert compare_drafts(drafts, texts, oracle, width, every=3) > 1
        assert served.count("num_accepted_tokens") > 0
        return served

    return run


@pytest.mark.parametrize("mode", only_fast(MODES, "eagle3"))
def test_drafts_and_output(mode: str, models: Path, heads, serve):
    """Drafts equal those of plain PyTorch: heads have M-RoPE positions, and draft
    models process images as placeholder tokens at plain positions."""
    spec = spec_of(mode, models, heads)
    serve(spec, partial(oracle_for, mode, Path(spec["model"])), MODES[mode])


@pytest.mark.slow
def test_embeddings_of_images(models: Path, tmp_path: Path, serve):
    """A head that takes embeddings is fed the target's, shifted like the tokens."""
    head = write_seeing_head(models, tmp_path / "head")
    spec = {"model": str(head), "method": "eagle", "num_speculative_tokens": 3}
    serve(spec, lambda target, sides: SeeingEagleOracle(head, target))


@pytest.mark.slow
def test_tree_of_a_head(models: Path, heads, serve):
    """Rows of the same depth share their M-RoPE positions."""
    tree = {"num_speculative_tokens": 4, "draft_tree": 15}
    served = serve(spec_of("peagle", models, heads, **tree))
    assert served.counters["num_accepted_tree_nodes"][1] > 0
