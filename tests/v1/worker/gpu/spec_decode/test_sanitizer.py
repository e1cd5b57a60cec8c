# SPDX-License-Identifier: Apache-2.0
"""The input kernel's tests on a GPU under compute-sanitizer.

First a kernel that writes past a tensor's end is run the same way, which memcheck must
report: else nothing that follows would mean anything.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

HERE = Path(__file__).parent
KERNEL = "_prepare_inputs"
SANITIZER = shutil.which("compute-sanitizer")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        SANITIZER is None or not torch.cuda.is_available(),
        reason="needs a GPU and compute-sanitizer",
    ),
]


def num_reports(tool: str, *program: str) -> int:
    """Of a tool that runs a program; only kernels named as the input kernel count.

    Raises:
        AssertionError: it did not come to its summary.
    """
    env = os.environ | {
        "VLLM_TEST_EXAMPLES": "200",  # random batches per test: a tool makes them slow
        # Each tensor has memory of its own: behind its end is none of another's.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    command = [SANITIZER, "--tool", tool, "--kernel-name", f"kernel_substring={KERNEL}"]
    done = subprocess.run(
        [*command, sys.executable, *program],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    found = re.findall(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    assert found, output[-3000:]
    assert " failed" not in output, output[-3000:]
    return int(found[-1])


def test_a_planted_write_is_reported():
    assert num_reports("memcheck", str(HERE / "planted_write.py")) > 0


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_input_kernel(tool: str):
    tests = str(HERE / "test_unified_inputs.py")
    assert num_reports(tool, "-m", "pytest", "-q", tests) == 0
