# SPDX-License-Identifier: Apache-2.0
"""Jobs in processes of their own."""

import pytest

from benchmarks.spec_decode.jobs import run_jobs

TWICE = """
import json, sys
job = json.load(open(sys.argv[1]))
if job is None:
    sys.exit("no job")
json.dump(2 * job, open(sys.argv[2], "w"))
"""


@pytest.mark.parametrize("at_once", [1, 2])
def test_each_result_by_name(at_once: int):
    found = run_jobs(["-c", TWICE], {"a/b": 1, "c": 2, "d": 3}, "cpu", at_once)
    assert found == {"a/b": 2, "c": 4, "d": 6}


def test_a_failure_says_whose_and_why():
    with pytest.raises(SystemExit, match=r"(?s)bad failed:.*no job"):
        run_jobs(["-c", TWICE], {"good": 1, "bad": None}, "cpu", 2)
