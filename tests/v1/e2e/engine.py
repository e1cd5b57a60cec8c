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
        self.job, self.result = folder / "job.json", folder / "result.json"
        self.log = folder / "log.txt"
        self.forks, self.process = forks, None

    def _start(self, *files: Path) -> subprocess.Popen:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(JOB), *map(str, files)],
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _told(self) -> subprocess.Popen:
        """The process that runs the job, which is told of it."""
        if not self.forks:
            return self._start(self.job, self.result)
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        self.process.stdin.write(f"{self.job} {self.result}\n")
        self.process.stdin.flush()
        return self.process

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """What came of a job: its result, or `error`; and `log`."""
        self.job.write_text(json.dumps(job))
        begin = self.log.stat().st_size if self.log.exists() else 0
        process = self._told()
        status = process.stdout.readline().strip()
        if not self.forks:
            process.wait()
        log = self.log.read_bytes()[begin:].decode()
        assert status == "done", f"the engine's process ended:\n{log[-6000:]}"
        return json.loads(self.result.read_text()) | {"log": log}

    def end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
