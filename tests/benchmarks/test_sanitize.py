# SPDX-License-Identifier: Apache-2.0
"""What is believed of compute-sanitizer's output."""

import pytest

from benchmarks.spec_decode.planted import _prepare_inputs_planted
from benchmarks.spec_decode.sanitize import (
    KERNEL,
    command,
    num_reports,
    planted_reports,
    summarise,
)
from vllm.v1.worker.gpu.spec_decode.unified.inputs import _prepare_inputs_kernel

CLEAN = "16 passed in 9 s\n========= ERROR SUMMARY: 0 errors\n"
REPORT = f"""========= Invalid __global__ write of size 4 bytes
=========     at {KERNEL}_planted+0x90
========= ERROR SUMMARY: 64 errors
"""


def test_the_filter_names_both_kernels():
    for kernel in (_prepare_inputs_kernel, _prepare_inputs_planted):
        assert kernel.__name__.startswith(KERNEL)
    assert command("memcheck") != command("racecheck")
    assert f"kernel_substring={KERNEL}" in command("memcheck", ["x"])


def test_a_control_that_is_reported():
    assert planted_reports(REPORT) == 64


@pytest.mark.parametrize(
    "output",
    [CLEAN, "", REPORT.replace("64", "0"), REPORT.replace("_planted", "")],
    ids=["clean", "nothing", "no reports", "another kernel"],
)
def test_a_control_that_is_not(output: str):
    with pytest.raises(ValueError, match="did not report a planted write"):
        planted_reports(output)


def test_summary():
    found = summarise(CLEAN)
    assert found == {"reports": 0, "tests_passed": 16, "tests_failed": 0}
    assert num_reports("========= RACECHECK SUMMARY: 3 hazards displayed") == 3
    with pytest.raises(ValueError, match="did not finish"):
        summarise("16 passed")
