# SPDX-License-Identifier: Apache-2.0
"""Engines of tests, each in a process of its own; `engine_job.py` says what they do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("engine_job.py")
ENGINE = {
    "dtype": "float32",  # no two logits are equal by rounding
    "enforce_eager": True,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.1,
    "use_tqdm_on_load": False,
}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0", "TRITON_INTERPRET": "0"}


class Engines:
    """Runs jobs one after the other, by a process that has imported vLLM.

    It forks for each job. Where there is a GPU each job is a program of its own.
    """

    def __init__(self, env: dict[str, str], folder: Path, forks: bool) -> None:
        self.env = env | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        self.files = [str(folder / name) for name in ("job.json", "result.json")]
        self.log = (folder / "log.txt").open("w+")
        self.process = self._start(stdin=subprocess.PIPE) if forks else None

    def _start(self, *files: str, **how: Any) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(JOB), *files],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            **how,
        )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """What came of a job: its result, or `error`; and `log`."""
        Path(self.files[0]).write_text(json.dumps(job))
        begin = self.log.seek(0, 2)
        if self.process is None:
            process = self._start(*self.files)
        else:
            process = self.process
            process.stdin.write(" ".join(self.files) + "\n")
            process.stdin.flush()
        status = process.stdout.readline().strip()
        self.log.seek(begin)
        log = self.log.read()
        assert status == "done", f"the engine's process ended:\n{log[-6000:]}"
        return json.loads(Path(self.files[1]).read_text()) | {"log": log}

    def end(self) -> None:
        self.log.close()
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
