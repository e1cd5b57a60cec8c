# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for a GPU, also on a machine without one.

On a CPU the kernels' own tests require less of them than a GPU does.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

HERE = Path(__file__).parent
PLUGIN = f"{HERE.relative_to(ROOT)}/compile_only".replace("/", ".")
TESTS = [f"draft_tree/test_{name}.py" for name in ("accepted", "beams", "grow")]
TESTS += ["draft_tree/test_kernels.py", "test_argmax.py", "test_draft_window.py"]
TESTS += ["test_kept_states.py", "test_split_budget.py", "test_unified_inputs.py"]


def test_every_kernel_compiles(on_cpu: bool, tmp_path: Path):
    if not on_cpu:
        pytest.skip("the kernels' own tests compile them")
    report = tmp_path / "report.json"
    env = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / "build" / "triton-cache"),
        "VLLM_TEST_COMPILED": str(report),
        "VLLM_TEST_EXAMPLES": "2",
    }
    tests = [str(HERE / name) for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", PLUGIN, "-p", "no:xdist"]
    log = subprocess.run(
        [*command, *tests], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert report.is_file(), log.stdout + log.stderr
    found = json.loads(report.read_text())
    assert not found["errors"]
    files = [file.read_text() for file in ROOT.glob("vllm/**/spec_decode/**/*.py")]
    ours = set(re.findall(r"@triton\.jit\ndef (\w+_kernel)\(", "".join(files)))
    assert ours and ours <= set(found["launched"])
