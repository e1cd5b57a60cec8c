# SPDX-License-Identifier: Apache-2.0
"""A short soak of `vllm serve`: some seconds of what the benchmark does for minutes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SMALL = {
    "seconds": 8,
    "rounds": 2,
    "clients": 16,
    "leaving": 0.5,
    "prompts": 6,
    "longest-prompt": 120,
    "longest-output": 24,
    "max-num-seqs": 8,
    "kv-blocks": 13,
    # A server's first seconds: its memory has not settled. The long soak judges that.
    "max-growth-mib": 1024,
}


def test_soak(models: Path, on_cpu: bool, engine_env, tmp_path: Path):
    """P-EAGLE: no wrong token, no lost block, no request without an end.

    `test_spec_decode_server.py` has the like of it with PARD.
    """
    output = tmp_path / "soak.json"
    flags = {"device": "cpu" if on_cpu else "cuda", "dtype": "float32"} | SMALL
    flags |= {"modes": "peagle", "models": models, "output": output}
    command = [sys.executable, "-m", "benchmarks.spec_decode.soak"]
    done = subprocess.run(
        [*command, *(f"--{name}={value}" for name, value in flags.items())],
        cwd=ROOT,
        env=engine_env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(output.read_text())["soaks"].values()
    assert found["acceptance_length"] > 1.5
