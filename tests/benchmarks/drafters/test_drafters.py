# SPDX-License-Identifier: Apache-2.0
"""`vllm bench drafters` end to end, on the bundled models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "drafters"]
FAST = "--quick --num-prompts 4 --output-len 24 --concurrency 1 2"
# Emits a rejected draft in place of the target's own token.
LOSSY = """
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

verify = rejection_sampler.rejection_sample


def keep_one_more(logits, draft_logits, drafts, cu_num_logits, *rest, **more):
    sampled, num_sampled = verify(
        logits, draft_logits, drafts, cu_num_logits, *rest, **more
    )
    starts = cu_num_logits.tolist()
    for at, (start, end) in enumerate(zip(starts, starts[1:])):
        if (kept := int(num_sampled[at])) < end - start:
            sampled[at, kept - 1] = drafts[start + kept]
    return sampled, num_sampled


def plant():
    rejection_sampler.rejection_sample = keep_one_more
"""


def run(env: dict[str, str], *flags: str) -> subprocess.CompletedProcess:
    command = [*COMMAND, *FAST.split(), *flags]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_bundled_models(engine_env, tmp_path: Path):
    file = tmp_path / "found.json"
    done = run(engine_env, f"--json={file}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(file.read_text())
    drafters = {row["drafter"] for row in found["rows"] if row["speculative_config"]}
    assert drafters == {"draft", "pard", "pard2", "eagle3", "peagle"}
    for row in found["rows"]:
        assert row["tokens_per_s"] > 0 and row["memory_bytes"] > 0
        if row["speculative_config"]:
            assert row["acceptance_length"] >= 1 and row["ratio"] > 0
    assert found["is_lossless"] and not found["not_reached"]


@pytest.mark.slow
def test_lossy_acceptance_is_detected(engine_env, models, tmp_path: Path):
    """With engines that have a wrong acceptance rule."""
    (tmp_path / "planted.py").write_text(LOSSY)
    (package := tmp_path / "planted-1.0.dist-info").mkdir()
    (package / "METADATA").write_text("Name: planted\nVersion: 1.0\n")
    entry = "[vllm.general_plugins]\nplanted = planted:plant\n"
    (package / "entry_points.txt").write_text(entry)
    paths = str(tmp_path), engine_env.get("PYTHONPATH", "")
    env = engine_env | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    memory = ["--gpu-memory-utilization=0.2", "--kv-cache-memory-bytes=268435456"]
    small = ["--dtype=float32", "--enforce-eager", "--max-model-len=512", *memory]
    model = [f"--model={models}/target", "--drafter", f"{models}/pard"]
    done = run(env, *model, *small)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-4000:]
    assert "NOT LOSSLESS" in done.stdout and "differs after" in done.stdout
