# SPDX-License-Identifier: Apache-2.0
"""The speculative decoding example, as a user runs it."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "offline_inference" / "spec_decode.py"


@pytest.mark.slow
def test_bundled_models(engine_env):
    command = [sys.executable, str(EXAMPLE), "--output-len=16"]
    done = subprocess.run(command, env=engine_env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "'def add(a, b):' continues" in done.stdout
    assert float(re.search(r"Acceptance length: (\S+)", done.stdout)[1]) > 1
