# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters: its folder's name is all that is configured.

The drafts of each must be those of plain PyTorch, token for token.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.families import (
    PUBLISHED,
    Published,
    write_drafter,
    write_target,
)

from .oracle import load_model, oracle_for, same_as_alone, seeded_choices
from .test_unified_speculator import only_fast

# One of each family; the others are slow.
FAST = (
    "pard-qwen3",
    "pard2-qwen3",
    "peagle-amazon",
    "peagle-nemo",
    "peagle-specforge",
    "speculators-peagle-qwen3",
    "speculators-eagle3",
    "eagle3-nvidia",
    "eagle3-yuhuili",
)
SERVED_ALONE = "speculators-eagle3"
REFUSED = "must name a remote model repository"  # where vLLM takes no local target
WINDOWED = "gpt-oss"  # it has two groups of KV caches, and drafts for itself as well
PROMPTS = [list(range(100, 105)), list(range(200, 223))]
SEEDED, FREE = {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}


class Targets:
    """The targets' folders and models, each made when it is asked for."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder = cache(lambda name: write_target(name, folder / name, tokenizer))
        self.model = cache(lambda name: load_model(self.folder(name)))


@pytest.fixture(scope="module")
def targets(models: Path, tmp_path_factory) -> Targets:
    return Targets(tmp_path_factory.mktemp("targets"), models / "target")


def engine_job(spec: dict[str, Any] | None, target: Path) -> dict[str, Any]:
    """The engine's job; without a speculative config `target` is a drafter."""
    sampled = {"prompt": PROMPTS[0], "max_tokens": 6}
    return {
        "record_drafts": True,
        "engine": {
            "model": str(target),
            "speculative_config": spec,
            "max_model_len": 96,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        },
        "scenarios": {
            "greedy": [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS],
            "sampled": [sampled | {"sampling": each} for each in (SEEDED, FREE)],
        },
    }


def skip_without_experts(target: str, on_cpu: bool) -> None:
    """On a GPU: an install without `_moe_C`, which runs a mixture of experts."""
    import vllm._custom_ops  # noqa: F401  (loads what there is)

    is_windowed = target.startswith(WINDOWED)
    if is_windowed and not on_cpu and not hasattr(torch.ops._moe_C, "topk_softmax"):
        pytest.skip("gpt-oss runs on _moe_C.topk_softmax, which is not installed")


@pytest.mark.parametrize("name", only_fast(PUBLISHED, *FAST))
def test_drafts_are_those_of_plain_pytorch(name, targets, run_job, on_cpu, tmp_path):
    made = PUBLISHED[name]
    skip_without_experts(made.target, on_cpu)
    folder = write_drafter(name, tmp_path / name, targets.folder(made.target))
    # Every step drafts the file's length: "auto", the default, drafts fewer.
    fixed = {"num_speculative_tokens_per_batch_size": [[1, 64, made.num_drafts]]}
    spec = {"model": str(folder), **made.settings, **fixed}
    result = run_job(engine_job(spec, targets.folder(made.target)))
    assert_drafts(made, result, folder, targets.model(made.target))


def test_a_head_names_its_target(targets, run_job, takes_local_verifiers, tmp_path):
    made = PUBLISHED[SERVED_ALONE]
    target = targets.folder(made.target)
    folder = write_drafter(SERVED_ALONE, tmp_path / "head", target)
    result = run_job(engine_job(None, folder))
    if takes_local_verifiers:
        assert_drafts(made, result, folder, targets.model(made.target))
    else:
        assert REFUSED in result.get("error", "it started")


def assert_drafts(
    made: Published, result: dict[str, Any], folder: Path, target: torch.nn.Module
) -> None:
    assert_is_detected(made, result, folder)
    found, sampled = (result["scenarios"][key] for key in ("greedy", "sampled"))
    same_as_alone(target, PROMPTS, found["tokens"])
    with_seed, free = sampled["tokens"]
    text, first = PROMPTS[0] + with_seed, len(PROMPTS[0])
    assert with_seed == seeded_choices(target, text, first, **SEEDED)
    assert len(free) == 6 and max(free) < target.config.vocab_size
    assert compare_drafts(made, found, PROMPTS, folder, target) >= 20
    # A drafter that always says the same would prove nothing.
    assert len({token for *_, drafts in found["drafts"] for token in drafts}) > 20


def assert_is_detected(made: Published, result: dict[str, Any], folder: Path) -> None:
    """By its files, on Runner V2; the engine keeps no block."""
    assert "error" not in result, f"{folder.name}: {result['error']}"
    assert result["is_v2"] and result["drafter"].endswith("Drafter")
    assert re.findall(r"\] (Drafter .*)", result["log"]) == [
        expected_line(made, folder)
    ]
    assert result["leaked_blocks"] == 0


def expected_line(made: Published, folder: Path) -> str:
    if made.layers:
        fed_by = f"layers {made.layers}"
    elif made.method == "draft_model":
        fed_by = "tokens alone"
    else:
        fed_by = "layers (2, 4, 5), the target's defaults"  # of its eight
    return (
        f"Drafter {folder}: family {made.family!r}, method {made.method}, "
        f"{made.num_drafts} tokens a step, {made.width} a pass, mask token "
        f"{made.mask}, fed by {fed_by}."
    )


def compare_drafts(
    made: Published,
    found: dict[str, Any],
    prompts: list[list[int]],
    folder: Path,
    target: torch.nn.Module,
) -> int:
    """Drafts of an engine against plain PyTorch; the number of them."""
    oracle, compared = oracle_for(made, folder, target), 0
    texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
    for request, known, drafts in found["drafts"]:
        text = texts[int(request)]
        if known > len(text):
            continue  # past the last token kept
        # Nobody says how many to draft, so that the engine chooses; blocks are whole.
        wanted = oracle.drafts(text[:known], made.num_drafts, made.width)
        assert drafts == wanted[: len(drafts)], f"{folder.name} after {known} tokens"
        compared += 1
    return compared


def acceptance(found: dict[str, Any]) -> list[float]:
    """Share of draft steps in which the draft at each position was accepted."""
    counters = found["counters"]
    drafts = counters["num_drafts"][0]
    return [count / drafts for count in counters["num_accepted_tokens_per_pos"]]


@pytest.mark.slow
def test_a_target_with_windows_drafts_for_itself(targets, run_job, on_cpu):
    skip_without_experts(WINDOWED, on_cpu)
    folder = targets.folder(WINDOWED)
    job = engine_job(drafts_for_itself(folder, 4), folder)
    all_accepted(run_job(job), PROMPTS, targets.model(WINDOWED))


def test_the_target_drafts_for_itself(models, target, make_prompt, run_job):
    """It takes every draft, of prompts in chunks and in batches too."""
    prompts = [make_prompt(length, 20) for length in (24, 33, 48, 60)]
    folder = models / "target"
    job = engine_job(drafts_for_itself(folder, 5), folder)
    job["engine"] |= {
        "max_model_len": 128,
        "max_num_batched_tokens": 40,
        "max_num_seqs": 3,
    }
    job["scenarios"] = {"greedy": [{"prompt": p, "max_tokens": 32} for p in prompts]}
    all_accepted(run_job(job), prompts, target)


def drafts_for_itself(target: Path, num_drafts: int) -> dict[str, Any]:
    return {
        "model": str(target),
        "method": "draft_model",
        "num_speculative_tokens": num_drafts,
    }


def all_accepted(
    result: dict[str, Any], prompts: list[list[int]], target: torch.nn.Module
) -> None:
    """What the target drafts from is what it sees: it takes every draft."""
    assert "error" not in result, result["error"]
    found = result["scenarios"]["greedy"]
    same_as_alone(target, prompts, found["tokens"])
    assert set(acceptance(found)) == {1.0}
    assert found["counters"]["num_drafts"][0] > 3


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def with_unknown(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.ones(4)


# What becomes of a tensor of which drafter, and what the error names. Only of the
# pickled one the headers cannot be looked at before it is loaded.
PICKLED = "eagle3-yuhuili"
UNKNOWN = "has a tensor {}, for which the model"
CHANGES = {
    "midlayer.self_attn.k_proj.weight": (
        PICKLED,
        without,
        "lacks layers.0.self_attn.k_proj.weight:",
    ),
    "d2t": (PICKLED, without, "lacks d2t:"),
    "parallel_draft_heads.0.lm_head.weight": (PICKLED, with_unknown, UNKNOWN),
    "model.layers.1.mlp.experts.weight": ("pard-qwen3", with_unknown, UNKNOWN),
    "target_proj.weight": ("pard2-qwen3", with_unknown, UNKNOWN),
    "medusa_heads.0.weight": ("peagle-amazon-reduced", with_unknown, UNKNOWN),
    "input_norm.weight": ("speculators-eagle3", with_unknown, UNKNOWN),
}


def change(folder: Path, name: str, how: Callable[..., None]) -> None:
    """Changes the one file of tensors, of either kind."""
    if (file := folder / "pytorch_model.bin").is_file():
        tensors = torch.load(file, weights_only=True)
        how(tensors, name)
        torch.save(tensors, file)
        return
    file = folder / "model.safetensors"
    tensors = load_file(file)
    how(tensors, name)
    save_file(tensors, file)


@pytest.mark.parametrize("tensor", only_fast(CHANGES, "d2t", "target_proj.weight"))
def test_incomplete_checkpoints_are_refused(tensor, targets, run_job, tmp_path):
    """Tensors that are missing, and those that the model has no place for."""
    name, how, said = CHANGES[tensor]
    target = targets.folder(PUBLISHED[name].target)
    folder = write_drafter(name, tmp_path / "drafter", target)
    change(folder, tensor, how)
    result = run_job(engine_job({"model": str(folder)}, target))
    assert said.format(tensor) in result.get("error", "it loaded")
