# SPDX-License-Identifier: Apache-2.0
"""Runs the input kernel's tests on a GPU under compute-sanitizer."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from vllm.v1.worker.gpu.spec_decode.unified.input_kernel import prepare_inputs_kernel

HERE = Path(__file__).parent
KERNEL = prepare_inputs_kernel.fn.__name__  # with a wrong name nothing is checked
SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        SANITIZER is None or not torch.cuda.is_available(),
        reason="needs a GPU and compute-sanitizer",
    ),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_input_kernel(tool: str):
    env = os.environ | {
        "VLLM_TEST_EXAMPLES": "200",  # random batches per test: a tool makes them slow
        # Each tensor has its own allocation, so accesses past its end are found.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [SANITIZER, "--tool", tool, "--kernel-name", f"kernel_substring={KERNEL}"]
    tests = ["-m", "pytest", "-q", str(HERE / "test_unified_inputs.py")]
    done = subprocess.run(
        [*command, sys.executable, *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    found = re.findall(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    assert found, output[-3000:]
    assert " failed" not in output, output[-3000:]
    assert int(found[-1]) == 0, output[-3000:]
