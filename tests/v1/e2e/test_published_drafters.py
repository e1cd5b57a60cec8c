# SPDX-License-Identifier: Apache-2.0
"""Every family of published drafters: its folder's name is all that is configured.

The drafts of each must be those of plain PyTorch, token for token.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.families import (
    PUBLISHED,
    TARGETS,
    write_drafter,
    write_target,
)

from .conftest import ENGINE
from .head_oracle import HeadOracle, ModelOracle, Pard2Oracle, load_model

JOB = Path(__file__).with_name("families_job.py")
DEFAULT_LAYERS = (2, 4, 5)  # 2, L // 2 and L - 3 of a target of 8 layers
# Engines cost seconds: some run one after the other in one process.
GROUPS = [tuple(PUBLISHED)[start::4] for start in range(4)]
SERVED_ALONE = "speculators-eagle3"
PROMPTS = [list(range(100, 105)), list(range(200, 223))]


@pytest.fixture(scope="module")
def targets(models: Path, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    return {
        name: write_target(name, folder / name, models / "target") for name in TARGETS
    }


def engine_job(folder: Path, target: Path) -> dict[str, Any]:
    """The engine's job; a drafter that names its target may be served alone."""
    alone = folder.name == SERVED_ALONE
    request = {"max_tokens": 12}
    sampled = request | {"sampling": {"temperature": 1.0, "seed": 3}}
    return {
        "async_scheduling": False,
        "idle_every": 0,
        "record_drafts": True,
        "record_graphs": False,
        "engine": {
            **ENGINE,
            "model": str(folder if alone else target),
            "speculative_config": None if alone else {"model": str(folder)},
            "max_model_len": 96,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        },
        "scenarios": {
            "greedy": [request | {"prompt": prompt} for prompt in PROMPTS],
            "sampled": [sampled | {"prompt": PROMPTS[0]}],
        },
    }


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


@pytest.mark.parametrize("names", GROUPS, ids="+".join)
def test_drafts_are_those_of_plain_pytorch(
    names: Sequence[str], targets, engine_env, tmp_path
):
    folders, jobs = {}, {}
    for name in names:
        target = targets[PUBLISHED[name].target]
        folders[name] = write_drafter(name, tmp_path / name, target)
        jobs[name] = engine_job(folders[name], target)
    results = run_engines(jobs, engine_env, tmp_path)
    for name in names:
        result, target = results[name], targets[PUBLISHED[name].target]
        assert "error" not in result, f"{name}: {result['error']}"
        assert result["is_v2"] and result["drafter"].endswith("Drafter")
        assert result["lines"] == [expected_line(name, folders[name])]
        assert_same_drafts(name, result, folders[name], target)
        assert len(result["scenarios"]["sampled"]["tokens"][0]) == 12
        assert result["leaked_blocks"] == 0


def expected_line(name: str, folder: Path) -> str:
    made = PUBLISHED[name]
    default = "layers the target's defaults"
    if made.method == "draft_model":
        default = "tokens alone"
    fed_by = f"layers {made.layers}" if made.layers else default
    return (
        f"Drafter {folder}: family {made.family!r}, method {made.method}, "
        f"{made.num_drafts} tokens a step, {made.width} a pass, mask token "
        f"{made.mask}, fed by {fed_by}."
    )


def assert_same_drafts(
    name: str, result: dict[str, Any], folder: Path, target: Path
) -> None:
    made = PUBLISHED[name]
    if made.warp is not None:
        oracle = Pard2Oracle(folder, load_model(target), made.layers)
    elif made.method == "draft_model":
        oracle = ModelOracle(folder)
    else:
        oracle = HeadOracle(folder, load_model(target), made.layers or DEFAULT_LAYERS)
    found = result["scenarios"]["greedy"]
    texts = [p + t for p, t in zip(PROMPTS, found["tokens"], strict=True)]
    compared, kinds = 0, set()
    with torch.inference_mode():
        for request, known, drafts in found["drafts"]:
            text = texts[int(request)]
            if known > len(text):
                continue  # past the last token kept
            wanted = oracle.drafts(text[:known], made.num_drafts, made.width)
            assert drafts == wanted, f"{name} after {known} tokens"
            compared += 1
            kinds |= set(drafts)
    assert compared >= 20
    assert len(kinds) > 20  # a drafter that always says the same would prove nothing


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def with_unknown(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = torch.zeros(4)


# What becomes of a tensor of a head, and what the error names.
CHANGES = {
    "midlayer.self_attn.k_proj.weight": (without, "layers.0.self_attn.k_proj.weight"),
    "d2t": (without, "lacks d2t"),
    "parallel_draft_heads.0.lm_head.weight": (with_unknown, "parallel_draft_heads"),
}


def test_incomplete_checkpoints_are_refused(targets, engine_env, tmp_path):
    """A pickled file has no headers to look at before it is loaded."""
    jobs = {}
    for number, (tensor, (change, _)) in enumerate(CHANGES.items()):
        folder = tmp_path / str(number)
        write_drafter("eagle3-yuhuili", folder, targets["llama"])
        tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
        change(tensors, tensor)
        torch.save(tensors, folder / "pytorch_model.bin")
        jobs[tensor] = engine_job(folder, targets["llama"])
    results = run_engines(jobs, engine_env, tmp_path)
    for tensor, (_, said) in CHANGES.items():
        assert said in results[tensor].get("error", "it loaded")
