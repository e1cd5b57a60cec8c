# SPDX-License-Identifier: Apache-2.0
"""Engines for end-to-end tests: each one runs once, in a process of its own."""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).with_name("engine_job.py")
ENGINE = {
    "dtype": "float32",  # no two logits are equal by rounding
    "enforce_eager": True,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.1,
    "use_tqdm_on_load": False,
}
RunEngine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_engine(models: Path, engine_env: dict[str, str]) -> RunEngine:
    """Runs scenarios in an engine with the bundled target.

    Arguments: the scenarios, the runner ("V1" or "V2"), the speculative config, the
    script, if not `engine_job`, what that explains, and the engine's own arguments.
    Returns what the script's `run` returns, and the engine's log.
    """

    def run(
        scenarios,
        runner="V2",
        speculative_config=None,
        *,
        script=JOB,
        async_scheduling=False,
        idle_every=0,
        record_drafts=False,
        record_graphs=False,
        **engine,
    ):
        job = {
            "async_scheduling": async_scheduling,
            "idle_every": idle_every,
            "record_drafts": record_drafts,
            "record_graphs": record_graphs,
            "engine": {
                **ENGINE,
                "model": str(models / "target"),
                "speculative_config": speculative_config,
                **engine,
            },
            "scenarios": scenarios,
        }
        env = engine_env | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        if runner == "V1":
            env |= {"VLLM_USE_V2_MODEL_RUNNER": "0", "TRITON_INTERPRET": "0"}
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, "job.json"), Path(folder, "result.json")]
            files[0].write_text(json.dumps(job))
            command = [sys.executable, str(script), *map(str, files)]
            done = subprocess.run(command, env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-6000:]
            result = json.loads(files[1].read_text())
            result["log"] = done.stdout + done.stderr
        assert result["is_v2"] == (runner == "V2")
        return result

    return run


@pytest.fixture(scope="session")
def held_out_tokens(models: Path) -> list[int]:
    """Token ids of held-out modules of this interpreter's standard library."""
    import sysconfig

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    names = json.loads((models / "held_out.json").read_text())
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [(folder / f"{name}.py").read_text() for name in names[:6]]
    return tokenizer("\n".join(texts), add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="session")
def make_prompt(held_out_tokens: list[int]) -> Callable[[int, int], list[int]]:
    """A prompt of a given length; the same seed gives the same prompt."""

    def make(length: int, seed: int) -> list[int]:
        last = len(held_out_tokens) - length
        start = random.Random(f"{length}-{seed}").randrange(last)
        return held_out_tokens[start : start + length]

    return make
