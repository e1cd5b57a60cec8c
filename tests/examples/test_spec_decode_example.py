# SPDX-License-Identifier: Apache-2.0
"""The speculative decoding example, as a user runs it."""

import gzip
import json
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from tests.conftest import ROOT
from vllm.benchmarks.drafters.questions import read_questions

EXAMPLE = ROOT / "examples" / "offline_inference" / "spec_decode.py"
HUB = "--dataset-name hf --dataset-path philschmid/mt-bench"
# As in vllm-project/vllm#24322 and #20459: how drafters were measured there. The model
# and the number of drafts that they come to.
LINES = {
    "draft_model": (
        f"--model-dir Qwen/Qwen3-32B --draft-model Qwen/Qwen3-1.7B {HUB} "
        "--num_spec_tokens 3 --num_prompts 100 --temp 1.0 --gpu-memory-utilization 0.9",
        ("Qwen/Qwen3-1.7B", 3),
    ),
    "eagle3": (
        "--model-dir meta-llama/Llama-3.1-8B-Instruct --eagle-dir "
        f"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B {HUB} --num_spec_tokens 7 "
        "--num_prompts 80 --temp 0.0 --gpu-memory-utilization 0.9",
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 7),
    ),
    "eagle": (
        f"{HUB} --num_spec_tokens 4 --num_prompts 100 --temp 0.7",
        ("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", 4),
    ),
}
# Small models in their place; there is no EAGLE head of the first generation.
SMALL = {
    "Qwen/Qwen3-32B": "target",
    "meta-llama/Llama-3.1-8B-Instruct": "target",
    "Qwen/Qwen3-1.7B": "draft",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "eagle3",
}
QUESTIONS = {
    "mt-bench": {"question_id": 81, "turns": ["def add(a, b):", "Why?"]},
    "gsm8k": {"question": "def add(a, b):", "answer": "#### 1"},
    "humaneval": {"prompt": "def add(a, b):", "task_id": "HumanEval/0"},
}


@pytest.fixture(scope="module")
def example():
    spec = spec_from_file_location("spec_decode_example", EXAMPLE)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", LINES)
def test_published_command_lines_are_understood(example, method: str):
    words, (model, length) = LINES[method]
    args = example.parse([*words.split(), "--method", method])
    config = {"model": model, "method": method, "num_speculative_tokens": length}
    assert example.speculative_config(args) == config
    assert args.num_prompts in (80, 100) and args.dataset_name == "hf"


def test_flags_of_vllms_example_are_understood(example):
    words = (
        "--tp 2 --enforce-eager --max-model-len 512 --max-num-seqs 4 --top-p 0.9 "
        "--top-k 20 --output-len 32 --print-output --test --model-dir target "
        "--draft-model draft --parallel-drafting --use-heterogeneous-vocab"
    )
    args = example.parse(words.split())
    assert example.speculative_config(args) == {
        "model": "draft",
        "parallel_drafting": True,
        "use_heterogeneous_vocab": True,
    }
    assert (args.tensor_parallel_size, args.top_p, args.output_len) == (2, 0.9, 32)


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_of_local_files(name: str, tmp_path: Path):
    file = write_questions(name, tmp_path)
    assert read_questions(name, file) == ["def add(a, b):"]
    zipped = tmp_path / "questions.jsonl.gz"
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    assert read_questions(name, zipped) == ["def add(a, b):"]
    other = next(kind for kind in QUESTIONS if kind != name)
    with pytest.raises(ValueError, match=f"not the questions of {other}: each line"):
        read_questions(other, file)
    with pytest.raises(ValueError, match="no such file"):
        read_questions(name, tmp_path / "missing")


def write_questions(name: str, folder: Path) -> Path:
    rows = [QUESTIONS[name]]
    if name == "mt-bench":  # Spec-Bench's file has other questions behind it
        rows.append({"question_id": 161, "turns": ["A question of another set."]})
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("method", ["bundled", "draft_model", "eagle3"])
def test_runs(method: str, engine_env, models, tmp_path: Path):
    words = ["--output-len=16", "--test", "--print-output"]
    if method != "bundled":
        small = {name: str(models / folder) for name, folder in SMALL.items()}
        file = write_questions("mt-bench", tmp_path)
        small |= {"hf": "mt-bench", "philschmid/mt-bench": str(file), "0.9": "0.3"}
        words += ["--method", method]
        words += [small.get(word, word) for word in LINES[method][0].split()]
    command = [sys.executable, str(EXAMPLE), *words]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "def add(a, b):" in done.stdout
    assert float(re.search(r"mean acceptance length: (\S+)", done.stdout)[1]) > 1
    assert re.search(r"acceptance at token 0: 0\.\d\d", done.stdout)
