# SPDX-License-Identifier: Apache-2.0
"""The trees that an engine grows become rows of a recording."""

import subprocess
import sys

import pytest

from benchmarks.spec_decode.traces import Trace, tokens_per_step
from tests.conftest import ROOT

RECORD = """
import sys
from benchmarks.spec_decode.record import Recorder
from vllm.benchmarks.drafters.engine import Engine

models, name, out = sys.argv[1:]
spec = {"model": f"{models}/{name}", "num_speculative_tokens": 4, "draft_tree": 15}
small = {"max_model_len": 256, "max_num_seqs": 4, "gpu_memory_utilization": 0.2}
engine = Engine(
    model=f"{models}/target", speculative_config=spec, dtype="float32", **small,
    enforce_eager=True, async_scheduling=False, disable_log_stats=False,
)
recorder = Recorder(engine.llm)
prompts = [[0, *range(300 + 40 * n, 310 + 40 * n)] for n in range(3)]
sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
found = engine.run(prompts, sampling, 3)
assert found.counts["accepted_tokens"] == [0]
recorder.add(prompts, [answer.tokens for answer in found.answers])
recorder.take({}).save(out)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pard", "eagle3"])
def test_recording_of_an_engine(name: str, engine_env, models, tmp_path):
    command = [sys.executable, "-c", RECORD, models, name, tmp_path / "it.npz"]
    env = engine_env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = Trace.load("it", tmp_path)
    assert found.has_passes == (name == "eagle3")
    assert found.lengths.tolist() == [36] * 3 and found.depth == 4
    assert found.parents.shape == (108, 15) and (found.confidence <= 1).all()
    chain, tree = tokens_per_step(found, 4), tokens_per_step(found, 4, 15)
    assert 1.2 < chain <= tree <= 5
