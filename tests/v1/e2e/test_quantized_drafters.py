# SPDX-License-Identifier: Apache-2.0
"""Quantized drafters as published: drafts are those of PyTorch on the weights that the
quantized ones stand for, but for the rounding of activations. And drafters that are
quantized to fp8 while loading: acceptance is close to that in bfloat16.
"""

import json
import operator
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.quantized import quantize
from tests.checkpoints.tensors import Tensors

from .oracle import read_config
from .runner import Request, Served
from .test_unified_speculator import MODES, PARALLEL, only_fast, oracle_of, speculative
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
BY_VLLM = ["lm_head", *(f"draft_model.model.{layer}" for layer in PROJECTIONS)]
FORMATS = ("int8 W8A8", "fp8 W8A8", "ModelOpt fp8", "GPTQ", "AWQ")
Make = Callable[[Path, str], Tensors]


def whole_but(skipped: tuple[str, ...], ignored: list[str] | None = None) -> Make:
    """All layers but these, named by `ignored`, by default as the file's tensors."""
    return lambda folder, name: quantize(folder, name, skipped, ignored)


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
    int8 = quantize(folder, name, tuple(paths - layers))
    group = read_config(folder)["quantization_config"]["config_groups"]["group_0"]
    group |= {"targets": sorted(layers), "format": "int-quantized"}
    made, config = quantize(folder, "fp8 W8A8", named), read_config(folder)
    mixed = config["quantization_config"]
    fp8 = mixed["config_groups"]["group_0"] | {"format": "float-quantized"}
    fp8["targets"] = [r"re:.*(o_proj|up_proj|fc)$", r"re:.*layers\.[1-9].*"]
    mixed["config_groups"] = {"group_0": group, "group_1": fp8}
    mixed |= {"ignore": ["lm_head"], "format": "mixed-precision"}
    (folder / CONFIG).write_text(json.dumps(config))
    return made | {f"{layer}.weight": int8[f"{layer}.weight"] for layer in layers}


PAIRS = [(name, "by_name", whole_but(PROJECTIONS)) for name in FORMATS]
PAIRS += [(n, "by_pattern", whole_but(PROJECTIONS, p)) for n, p in BY_PATTERN.items()]
# All linear layers are quantized; a tied lm_head is none of the file's layers.
PAIRS += [(name, "by_class", whole_but((), [])) for name in FORMATS]
PAIRS += [("int8 W8A8", "in_two_formats", in_two_formats)]
ROWS = [(mode, *pair) for mode in ("pard", "eagle3") for pair in PAIRS]
ROWS += [
    ("pard", "int8 W8A8", "by_vllm_name", whole_but(PROJECTIONS, BY_VLLM)),
    ("eagle3", "fp8 W8A8", "plain_fc", whole_but(("fc",))),
    ("eagle3", "AWQ", "plain_fc", whole_but(("fc",))),
    ("eagle3", "int8 W8A8", "of_midlayer", of_midlayer),
    ("eagle3", "GPTQ", "of_midlayer", of_midlayer),
]
CASES = {f"{mode}, {name}, {how}": (mode, name, make) for mode, name, how, make in ROWS}
FAST = ("pard, int8 W8A8, by_name", "eagle3, int8 W8A8, in_two_formats")


@pytest.mark.parametrize("case", only_fast(CASES, *FAST))
def test_drafts_match_pytorch(
    case: str, models, vllm_runner, target, make_prompt, tmp_path
):
    mode, name, make = CASES[case]
    quantized, whole = tmp_path / "quantized" / mode, tmp_path / "whole" / mode
    for folder in (quantized, whole):
        shutil.copytree(models / mode, folder)
    weights = make(quantized, name)
    save_file({n: t.contiguous() for n, t in weights.items()}, whole / WEIGHTS)
    requests = [Request(make_prompt(length, 0), TOKENS) for length in LENGTHS]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 64, DRAFTS]]}
    spec = speculative(quantized.parent, mode, DRAFTS, **schedule)
    with vllm_runner(
        speculative_config=spec, dtype="bfloat16", max_model_len=128, max_num_seqs=4
    ) as llm:
        assert "is not used" not in llm.log
        llm.watch(Drafts)
        served = llm.generate(requests)
    oracle = oracle_of(mode, whole.parent, target)
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


IN_FP8 = {"quantization": "fp8_per_channel", "draft_lm_head_quantization": "fp8"}
ROUNDING = 0.5  # logits computed in bfloat16 in different batches differ by less


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@torch.inference_mode()
def test_acceptance_in_fp8(mode: str, vllm_runner, models, target, make_prompt):
    drafts, count, length = 7, 24, 96
    requests = [Request(make_prompt(48, seed), length) for seed in range(count)]

    def serve(**more: Any) -> tuple[Served, bool]:
        with vllm_runner(
            speculative_config=speculative(models, mode, drafts, **more),
            dtype="bfloat16",
            max_model_len=192,
            max_num_seqs=count,
        ) as llm:
            return llm.generate(requests), "a fp8 copy of the lm_head" in llm.log

    (whole, is_copied), (found, is_fp8) = serve(), serve(**IN_FP8)
    assert is_fp8 and not is_copied
    for text, answer in zip(found.texts(requests), found.tokens, strict=True):
        # Each token has the target's largest logit, up to rounding.
        logits = target(torch.tensor([text])).logits[0, -length - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(answer) == length
        assert (logits.amax(1) - chosen).max() < ROUNDING
    in_bfloat16, in_fp8 = (
        torch.tensor(each.counters["num_accepted_tokens_per_pos"][:drafts])
        / each.count("num_drafts")
        for each in (whole, found)
    )
    change = in_fp8 - in_bfloat16
    assert in_bfloat16[0] > 0.5
    assert change.abs().max() < 0.03 and change.mean().abs() < 0.015
