# SPDX-License-Identifier: Apache-2.0
"""Random drafters for a target with M-RoPE, with images in the prompt or text only.

`test_targets.py` has more such targets, with drafters whose drafts are right: draft
models among them, which process images as placeholder tokens at plain positions.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from PIL import Image
from transformers import AutoModelForImageTextToText, BatchFeature

from tests.checkpoints.tensors import head, random, shapes_of, write_checkpoint

from .hooks import drafter_name
from .image_targets import (
    IMAGE_TARGETS,
    MROPE,
    QWEN_PROCESSOR,
    picture,
    register_model,
    save_image_target,
)
from .oracle import EagleOracle, HeadOracle, assert_output_matches, compare_drafts
from .recorded import Replays
from .runner import Request, Served
from .target_models import DRAFTER, MASK, SIZE, VOCAB, prompt
from .test_unified_speculator import SAMPLING, only_fast
from .watches import Drafts

# Without deepstack, so that a cell's embedding is that of a token.
QWEN = IMAGE_TARGETS["Qwen3-VL"]
# EAGLE-3 heads are fed the input of the last layer.
HEAD_TAPS = [3]
# Prompts are chunked; chunks end within images and between them.
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "limit_mm_per_prompt": {"image": 2, "video": 0},
}
SIDES = [[(2, 3)], [], [(3, 3), (4, 2)], [(6, 6)]]  # of images by request, in cells
SEEDED = 3  # index of the request that is sampled
MODEL = {k: v for k, v in DRAFTER.items() if k != "draft_vocab_size"} | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "attention_bias": False,
}
EAGLE3 = MODEL | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": VOCAB,
    "rope_parameters": MROPE,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": HEAD_TAPS,
    },
}


def save_eagle(folder: Path, kind: str) -> Path:
    """An EAGLE head: a Llama's has no norms, a Mistral's is fed images."""
    config = MODEL | {"architectures": [f"{kind}ForCausalLM"]}
    config |= {"model_type": kind.lower()}
    shapes = {n: s for n, s in shapes_of(config).items() if n.startswith("model.l")}
    if kind == "Mistral":
        shapes["model.norm.weight"] = (SIZE,)
    else:
        del shapes["model.layers.0.input_layernorm.weight"]
    shapes["model.fc.weight"] = (SIZE, 2 * SIZE)
    tensors = {name: random(name, *shape) for name, shape in shapes.items()}
    if kind == "Llama":
        tensors = {n.removeprefix("model."): t for n, t in tensors.items()}
    return write_checkpoint(folder, config, tensors)


def save_drafter(mode: str, folder: Path) -> Path:
    if mode.startswith("eagle-"):
        return save_eagle(folder, mode.removeprefix("eagle-"))
    tensors, config = head(EAGLE3, len(HEAD_TAPS)), EAGLE3
    if mode == "peagle":
        config = config | {"mask_token_id": MASK, "num_speculative_tokens": 7}
        tensors["mask_hidden"] = random("mask_hidden", 1, SIZE)
    return write_checkpoint(folder, config, tensors)


class Seen:
    """A Qwen3-VL with the images of a prompt, used like a language model by oracles."""

    def __init__(self, target: nn.Module, images: list[Image.Image]) -> None:
        self.target, self.config = target, target.config.get_text_config()
        self.seen = BatchFeature()
        if images:
            self.seen = QWEN_PROCESSOR(images=images, return_tensors="pt")
        self.get_input_embeddings = target.get_input_embeddings
        self.get_output_embeddings = target.get_output_embeddings

    def __call__(self, tokens: torch.Tensor, **given: Any) -> Any:
        given |= dict(self.seen)
        if self.seen:
            given["mm_token_type_ids"] = self.is_image(tokens).int()
        return self.target(tokens, **given)

    def is_image(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens == self.target.config.image_token_id

    def embeddings(self) -> torch.Tensor:
        """[cells, H], of all images."""
        found = self.target.model.get_image_features(**self.seen).pooler_output
        return torch.cat([rows.view(-1, rows.shape[-1]) for rows in found])

    def places(self, tokens: list[int]) -> torch.Tensor:
        """[3, 1, n], M-RoPE positions of time, height and width."""
        if not self.seen:
            return torch.arange(len(tokens)).expand(3, 1, -1)
        ids, grids = torch.tensor([tokens]), self.seen["image_grid_thw"]
        is_image = self.is_image(ids).int()
        return self.target.model.get_rope_index(ids, is_image, grids)[0]


class MRopeHeadOracle(HeadOracle):
    """An EAGLE-3 head that was trained on M-RoPE positions."""

    def drafts(self, known: list[int], count: int, width: int) -> list[int]:
        # Drafts and masks have positions of text.
        places = self.target.places(known + [0] * count)
        rope = self.target.target.model.language_model.rotary_emb
        self.rope = lambda hidden, _: rope(hidden, places[..., : len(hidden)])
        return super().drafts(known, count, width)


class SeeingEagleOracle(EagleOracle):
    """An EAGLE head like Mistral's: with norms, and fed embeddings of images."""

    def _embeddings(self, tokens: list[int]) -> torch.Tensor:
        found = super()._embeddings(tokens).clone()
        is_image = self.target.is_image(torch.tensor(tokens))
        if is_image.any():
            found[is_image] = self.target.embeddings()
        return found

    def _forward(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        mixed = torch.cat([self._embeddings(tokens), hidden], dim=-1)
        mixed = self._linear(mixed, "fc")
        normed = self._norm(mixed, "layers.0.input_layernorm")
        return self._norm(self._layer(0, mixed, normed), "norm")


# Drafts per pass, method, and oracle.
MODES: dict[str, tuple[int, str, Any]] = {
    "eagle3": (1, "eagle3", partial(MRopeHeadOracle, layers=HEAD_TAPS)),
    "peagle": (7, "eagle3", partial(MRopeHeadOracle, layers=HEAD_TAPS)),
    "eagle-Llama": (1, "eagle", EagleOracle),
    "eagle-Mistral": (1, "eagle", SeeingEagleOracle),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    tower = QWEN.more["vision_config"] | {"deepstack_visual_indexes": []}
    flat = QWEN._replace(more=QWEN.more | {"vision_config": tower})
    return save_image_target(flat, tmp_path_factory.mktemp("vl") / "target")


@pytest.fixture(scope="module")
def target(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    )


def images_of(number: int) -> list[Any]:
    return [picture(*side, number + i) for i, side in enumerate(SIDES[number])]


def request(number: int, is_whole: bool) -> Request:
    """With one image, two or none; a whole prompt has a token for each cell of it."""
    text, sides = prompt(24 + 9 * number), SIDES[number]
    start, image, end = QWEN.image()
    tokens, each = [], len(text) // (len(sides) + 1)
    for i, (rows, columns) in enumerate(sides):
        cells = rows * columns if is_whole else 1
        tokens += [*text[i * each : (i + 1) * each], start, *[image] * cells, end]
    tokens += text[len(sides) * each :]
    asked: Any = tokens
    if sides and not is_whole:
        shown = {"image": images_of(number)}
        asked = {"prompt_token_ids": tokens, "multi_modal_data": shown}
    return Request(asked, 20, **SAMPLING if number == SEEDED else {})


@pytest.mark.parametrize("mode", only_fast(MODES, "eagle3", "eagle-Llama"))
def test_drafts_and_output(mode: str, vllm_runner, folder: Path, target, tmp_path):
    """Drafts equal those of plain PyTorch: EAGLE-3 heads have M-RoPE positions."""
    width, method, oracle = MODES[mode]
    drafter = save_drafter(mode, tmp_path / mode)
    spec = {"model": str(drafter), "method": method, "num_speculative_tokens": 7}
    setup = [partial(register_model, str(folder))]
    numbers = range(len(SIDES))
    with vllm_runner(
        folder, graphs=True, speculative_config=spec, setup=setup, **ENGINE
    ) as llm:
        assert llm.call(drafter_name).endswith("Drafter")
        assert "Drafting falls back" not in llm.log
        llm.watch(Drafts)
        served = llm.generate([request(number, False) for number in numbers])
        assert llm.found(Replays)["first"] > 0
    whole = [request(number, True) for number in numbers]
    texts = served.texts(whole)
    for number in numbers:
        seen = Seen(target, images_of(number))
        alone = Served(served.outputs[number : number + 1], {})
        assert_output_matches(seen, whole[number : number + 1], alone)
        drafts = [each for each in served.drafts if each[0] == number]
        found = compare_drafts(drafts, texts, oracle(drafter, seen), width, every=3)
        assert found > 1
    # A drafter that always drafts the same tokens would prove nothing.
    assert len({token for *_, drafted in served.drafts for token in drafted}) > 20
