# SPDX-License-Identifier: Apache-2.0
"""Quantized drafters as published: drafts are those of PyTorch on the weights that the
quantized ones stand for, but for the rounding of activations.
"""

import json
import operator
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints.quantized import quantize
from tests.checkpoints.tensors import Tensors

from .oracle import HeadOracle, ModelOracle
from .runner import Request
from .test_unified_speculator import MODES, PARALLEL, only_fast, speculative
from .watches import Drafts

DRAFTS, TOKENS, LENGTHS = 4, 24, (30, 45, 60)
EQUAL = 0.9  # least share of drafts
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PROJECTIONS = tuple(f"layers.0.self_attn.{part}_proj" for part in "qkv")
BY_PATTERN = {
    "int8 W8A8": ["lm_head", r"re:.*layers\.0\.self_attn\.[qkv]_proj$"],
    "fp8 W8A8": ["re:.*lm_head", r"re:.*layers\.0\.self_attn\.[qkv]_proj$"],
    "ModelOpt fp8": ["lm_head", "*layers.0.self_attn.[qkv]_proj*"],
}
Make = Callable[[Path, str], Tensors]


def by_name(folder: Path, name: str) -> Tensors:
    """As the file's tensors are named."""
    return quantize(folder, name, PROJECTIONS)


def by_pattern(folder: Path, name: str) -> Tensors:
    return quantize(folder, name, PROJECTIONS, BY_PATTERN[name])


def by_class(folder: Path, name: str) -> Tensors:
    """All linear layers are quantized; a tied lm_head is none of the file's layers."""
    return quantize(folder, name, (), [])


def by_vllm_name(folder: Path, name: str) -> Tensors:
    ignored = [f"draft_model.model.{layer}" for layer in PROJECTIONS]
    return quantize(folder, name, PROJECTIONS, ["lm_head", *ignored])


def plain_fc(folder: Path, name: str) -> Tensors:
    return quantize(folder, name, ("fc",))


def of_midlayer(folder: Path, name: str) -> Tensors:
    """A head's first layer as SpecForge names it."""
    tensors = load_file(folder / WEIGHTS)
    first = {path: path.replace("layers.0.", "midlayer.") for path in tensors}
    save_file({first[path]: t for path, t in tensors.items()}, folder / WEIGHTS)
    ends = [layer.replace("layers.0.", "midlayer.") for layer in PROJECTIONS]
    return quantize(folder, name, ends)


def in_two_formats(folder: Path, name: str) -> Tensors:
    """int8 for layers that are named, merged ones among them, and fp8 for others."""
    named = (*PROJECTIONS, "layers.0.mlp.down_proj")
    paths = {path.removesuffix(".weight") for path in load_file(folder / WEIGHTS)}
    layers = {layer for layer in paths if layer.endswith(named)}
    rest = tuple(paths - layers)
    made = quantize(folder, name, rest)
    int8 = {path: made[path] for path in made if path.endswith("weight")}
    int8 = {
        path: t for path, t in int8.items() if path.removesuffix(".weight") in layers
    }
    groups = read(folder)["quantization_config"]["config_groups"]
    groups["group_0"] |= {"targets": sorted(layers), "format": "int-quantized"}
    made = quantize(folder, "fp8 W8A8", named) | int8
    config = read(folder)
    fp8 = config["quantization_config"]["config_groups"].pop("group_0")
    groups["group_1"] = fp8 | {"targets": [r"re:.*(o_proj|up_proj|fc)$"]}
    groups["group_1"]["targets"] += [r"re:.*layers\.[1-9].*"]
    groups["group_1"]["format"] = "float-quantized"
    config["quantization_config"] |= {"config_groups": groups, "ignore": ["lm_head"]}
    config["quantization_config"]["format"] = "mixed-precision"
    (folder / CONFIG).write_text(json.dumps(config))
    return made


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())


CASES: dict[str, tuple[str, str, Make]] = {
    f"{mode}, {name}, {make.__name__}": (mode, name, make)
    for mode in ("draft", "pard", "eagle3", "peagle")
    for name, makes in {
        "int8 W8A8": (by_name, by_pattern, by_class, in_two_formats),
        "fp8 W8A8": (by_name, by_pattern),
        "ModelOpt fp8": (by_name, by_pattern, by_class),
        "GPTQ": (by_name, by_class),
        "AWQ": (by_name, by_class),
    }.items()
    for make in makes
}
CASES |= {
    "pard, int8 W8A8, by_vllm_name": ("pard", "int8 W8A8", by_vllm_name),
    "eagle3, fp8 W8A8, plain_fc": ("eagle3", "fp8 W8A8", plain_fc),
    "eagle3, AWQ, plain_fc": ("eagle3", "AWQ", plain_fc),
    "eagle3, int8 W8A8, of_midlayer": ("eagle3", "int8 W8A8", of_midlayer),
    "eagle3, GPTQ, of_midlayer": ("eagle3", "GPTQ", of_midlayer),
}
FAST = ("pard, int8 W8A8, by_name", "eagle3, int8 W8A8, in_two_formats")


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_match_pytorch(
    case: str, models, vllm_runner, target, make_prompt, tmp_path
):
    mode, name, make = CASES[case]
    quantized, whole = tmp_path / "quantized", tmp_path / "whole"
    for folder in (quantized, whole):
        shutil.copytree(models / mode, folder)
    weights = make(quantized, name)
    save_file({n: t.contiguous() for n, t in weights.items()}, whole / WEIGHTS)
    requests = [Request(make_prompt(length, 0), TOKENS) for length in LENGTHS]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 64, DRAFTS]]}
    spec = speculative(models, mode, DRAFTS, **schedule) | {"model": str(quantized)}
    with vllm_runner(
        speculative_config=spec, dtype="bfloat16", max_model_len=128, max_num_seqs=4
    ) as llm:
        assert "is not used" not in llm.log
        llm.watch(Drafts)
        served = llm.generate(requests)
    is_head = MODES[mode]["method"] == "eagle3"
    oracle = (
        HeadOracle(whole, target, (1, 3, 5)) if is_head else ModelOracle(whole, target)
    )
    width, texts = DRAFTS if mode in PARALLEL else 1, served.texts(requests)
    equal = total = 0
    for number, known, drafted in served.drafts:
        if known <= len(text := texts[number]):
            wanted = oracle.drafts(text[:known], len(drafted), width)
            # Drafts after one that differs have another context.
            same = [*takewhile(bool, map(operator.eq, drafted, wanted))]
            equal += len(same)
            total += min(len(same) + 1, len(drafted))
    assert equal > EQUAL * total > 20, f"{equal} of {total}"
