# SPDX-License-Identifier: Apache-2.0
"""A soak of `vllm serve`: a minute in all of what the benchmark does for ten."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODES = ("pard", "peagle")
SMALL = {
    "seconds": 30,
    "rounds": 4,
    "clients": 64,
    "leaving": 0.5,
    "prompts": 6,
    "longest-prompt": 120,
    "longest-output": 24,
    "max-num-seqs": 8,
    "kv-blocks": 13,
    # From half time on. Workers so young take up to 70, which settles: see the ten
    # minutes in `benchmarks/README.md`.
    "max-growth-mib": 128,
}


@pytest.mark.slow
def test_soak(models: Path, on_cpu: bool, engine_env, tmp_path: Path):
    """No wrong token, no lost block, no request without an end, no growing memory."""
    output = tmp_path / "soak.json"
    flags = {"device": "cpu" if on_cpu else "cuda", "dtype": "float32"} | SMALL
    flags |= {"models": models, "output": output}
    command = [sys.executable, "-m", "benchmarks.spec_decode.soak", "--modes", *MODES]
    done = subprocess.run(
        [*command, *(f"--{name}={value}" for name, value in flags.items())],
        cwd=ROOT,
        env=engine_env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    soaks = json.loads(output.read_text())["measurements"]
    for mode in MODES:
        assert soaks[mode]["acceptance_length"] > 1.5
