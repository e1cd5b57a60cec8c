# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters: its folder's name is all that is configured.

The drafts of each must be those of plain PyTorch, token for token.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.families import (
    PUBLISHED,
    TARGETS,
    Published,
    write_drafter,
    write_target,
)
from tests.checkpoints.record import acceptance, detected, note

from .conftest import ENGINE
from .head_oracle import choices, load_model, oracle_for

JOB = Path(__file__).with_name("families_job.py")


def names_of(*targets: str) -> tuple[str, ...]:
    return tuple(name for name, made in PUBLISHED.items() if made.target in targets)


# Engines cost seconds: some run one after the other in one process.
GROUPS = [
    names_of("llama")[::2],
    names_of("llama")[1::2],
    names_of("qwen2", "qwen3"),
    names_of("gpt-oss", "gpt-oss-wide"),
]
SERVED_ALONE = "speculators-eagle3"
REFUSED = "must name a remote model repository"  # where the base takes no local target
WINDOWED = "gpt-oss"  # it has two groups of KV caches, and drafts for itself as well
PROMPTS = [list(range(100, 105)), list(range(200, 223))]


@pytest.fixture(scope="module")
def targets(models: Path, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        name: write_target(name, folder / name, models / "target") for name in TARGETS
    }


def engine_job(spec: dict[str, Any] | None, target: Path) -> dict[str, Any]:
    """The engine's job; without a speculative config `target` is a drafter."""
    sampled = {"prompt": PROMPTS[0], "max_tokens": 6}
    seeded, free = {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}
    return {
        "async_scheduling": False,
        "idle_every": 0,
        "record_drafts": True,
        "record_graphs": False,
        "engine": {
            **ENGINE,
            "model": str(target),
            "speculative_config": spec,
            "max_model_len": 96,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        },
        "scenarios": {
            "greedy": [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS],
            "sampled": [sampled | {"sampling": each} for each in (seeded, free)],
        },
    }


def drafter_job(name: str, folder: Path, target: Path) -> dict[str, Any]:
    return engine_job({"model": str(folder), **PUBLISHED[name].settings}, target)


def run_engines(
    jobs: dict[str, dict[str, Any]], env: dict[str, str], folder: Path
) -> dict[str, dict[str, Any]]:
    files = [folder / "jobs.json", folder / "results.json"]
    files[0].write_text(json.dumps(jobs))
    env = env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO"}
    command = [sys.executable, str(JOB), *map(str, files)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(files[1].read_text())


def lacks_experts() -> bool:
    """On a GPU: an install without `_moe_C`, which runs a mixture of experts."""
    import vllm._custom_ops  # noqa: F401  (loads what there is)

    return not hasattr(torch.ops._moe_C, "topk_softmax")


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_drafts_are_those_of_plain_pytorch(
    names: Sequence[str],
    targets,
    engine_env,
    on_cpu,
    takes_local_verifiers,
    tmp_path,
):
    models = {PUBLISHED[name].target for name in names}
    if WINDOWED in models and not on_cpu and lacks_experts():
        pytest.skip("gpt-oss runs on _moe_C.topk_softmax, which is not installed")
    folders, jobs = {}, {}
    for name in names:
        target = targets[PUBLISHED[name].target]
        folders[name] = write_drafter(name, tmp_path / name, target)
        jobs[name] = drafter_job(name, folders[name], target)
    if SERVED_ALONE in names:
        # It names its target itself.
        alone_job = engine_job(None, folders[SERVED_ALONE])
        jobs[SERVED_ALONE if takes_local_verifiers else REFUSED] = alone_job
    alone = {target: load_model(targets[target]) for target in models}
    if WINDOWED in models:
        jobs[WINDOWED] = own_job(targets[WINDOWED], 4)
    results = run_engines(jobs, engine_env, tmp_path)
    if REFUSED in jobs:
        assert REFUSED in results[REFUSED].get("error", "it started")
    if WINDOWED in models:
        all_accepted(results[WINDOWED], PROMPTS, alone[WINDOWED])
    seeded: dict[str, list[int]] = {}
    for name in names:
        made, result = PUBLISHED[name], results[name]
        target = alone[made.target]
        assert_is_detected(made, result, folders[name])
        found, sampled = (result["scenarios"][key] for key in ("greedy", "sampled"))
        same_as_alone(target, PROMPTS, found["tokens"])
        # A seed gives one text, whatever is drafted.
        with_seed, without = sampled["tokens"]
        assert seeded.setdefault(made.target, with_seed) == with_seed
        assert len(without) == 6 and max(without) < TARGETS[made.target]["vocab_size"]
        compared = compare_drafts(made, found, PROMPTS, folders[name], target)
        assert compared >= 20
        # A drafter that always says the same would prove nothing.
        assert len({token for *_, drafts in found["drafts"] for token in drafts}) > 20
        note(
            name,
            weights="random",
            target=made.target,
            detected=detected(result["lines"][0]),
            drafts_compared=compared,
            **acceptance(found["counters"]),
        )


def assert_is_detected(made: Published, result: dict[str, Any], folder: Path) -> None:
    """By its files, on Runner V2; the engine keeps no block."""
    assert "error" not in result, f"{folder.name}: {result['error']}"
    assert result["is_v2"] and result["drafter"].endswith("Drafter")
    assert result["lines"] == [expected_line(made, folder)]
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


def same_as_alone(
    target: torch.nn.Module, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Greedy answers are the target's own."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == choices(target, prompt + answer)[len(prompt) - 1 : -1]


def compare_drafts(
    made: Published,
    found: dict[str, Any],
    prompts: list[list[int]],
    folder: Path,
    target: torch.nn.Module,
    every: int = 1,
) -> int:
    """Drafts of an engine against plain PyTorch; the number of them."""
    oracle, compared = oracle_for(made, folder, target), 0
    texts = [p + t for p, t in zip(prompts, found["tokens"], strict=True)]
    for request, known, drafts in found["drafts"][::every]:
        text = texts[int(request)]
        if known > len(text):
            continue  # past the last token kept
        with torch.inference_mode():
            wanted = oracle.drafts(text[:known], made.num_drafts, made.width)
        assert drafts == wanted, f"{folder.name} after {known} tokens"
        compared += 1
    return compared


def own_job(target: Path, num_drafts: int) -> dict[str, Any]:
    """The engine's job where the target drafts for itself."""
    spec = {
        "model": str(target),
        "method": "draft_model",
        "num_speculative_tokens": num_drafts,
    }
    return engine_job(spec, target)


def all_accepted(
    result: dict[str, Any], prompts: list[list[int]], target: torch.nn.Module
) -> None:
    """What the target drafts from is what it sees: it takes every draft."""
    assert "error" not in result, result["error"]
    found = result["scenarios"]["greedy"]
    same_as_alone(target, prompts, found["tokens"])
    rates = acceptance(found["counters"])
    assert set(rates["acceptance_by_position"]) == {1.0} and rates["steps"] > 3


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


def test_incomplete_checkpoints_are_refused(targets, engine_env, tmp_path):
    """Tensors that are missing, and those that the model has no place for."""
    jobs = {}
    for tensor, (name, how, _) in CHANGES.items():
        target = targets[PUBLISHED[name].target]
        folder = write_drafter(name, tmp_path / tensor, target)
        change(folder, tensor, how)
        jobs[tensor] = engine_job({"model": str(folder)}, target)
    results = run_engines(jobs, engine_env, tmp_path)
    for tensor, (_, _, said) in CHANGES.items():
        assert said.format(tensor) in results[tensor].get("error", "it loaded")
