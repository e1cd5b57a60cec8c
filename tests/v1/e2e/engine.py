# SPDX-License-Identifier: Apache-2.0
"""Engines of tests, each in a separate process; see `engine_job.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("engine_job.py")
ENGINE = {
    "dtype": "float32",  # no ties of logits by rounding
    "enforce_eager": True,
    "disable_log_stats": False,
    "gpu_memory_utilization": 0.1,
    "use_tqdm_on_load": False,
}
# Keys of a job besides scenarios and the engine's arguments.
ASKED = ("async_scheduling", "defaults_of_a_gpu", "drafts_by_turns", "env")
ASKED += ("idle_every", "is_multimodal", "keep_drafts", "made_up_times")
ASKED += ("pauses_every", "preempts_every")
ASKED += ("record_drafts", "record_graphs", "sleeps", "updates", "watch_loading")
ASKED += ("watch_waits",)


class EngineError(Exception):
    """An engine did not start; its log is printed."""


class Engines:
    """Runs jobs one after the other.

    A process that has imported vLLM forks for each job. On a GPU each job is started as
    a new process.
    """

    def __init__(self, env: dict[str, str], folder: Path, forks: bool) -> None:
        self.env = env | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            # Also on a CPU without drafts, or with vLLM's own speculators.
            "VLLM_USE_V2_MODEL_RUNNER": "1",
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

    def _tell(self) -> None:
        """Makes a process run the job."""
        if not self.forks:
            self.process = self._start(self.job, self.result)
            return
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        self.process.stdin.write(f"{self.job} {self.result}\n")
        self.process.stdin.flush()

    def run(self, scenarios: dict[str, Any], **given: Any) -> dict[str, Any]:
        """Results of the scenarios, and `log`.

        Args:
            given: keys of a job (see `engine_job.py`), and arguments of the engine.

        Raises:
            EngineError: the engine did not start.
        """
        asked = {name: given.pop(name) for name in ASKED if name in given}
        job = asked | {"engine": ENGINE | given, "scenarios": scenarios}
        self.job.write_text(json.dumps(job))
        begin = self.log.stat().st_size if self.log.exists() else 0
        self._tell()
        status = self.process.stdout.readline().strip()
        if not self.forks:
            self.process.wait()
        log = self.log.read_bytes()[begin:].decode()
        assert status == "done", f"the engine's process ended:\n{log[-6000:]}"
        result = json.loads(self.result.read_text())
        if "error" in result:
            print(log[-6000:])
            raise EngineError(result["error"])
        assert "Using V2 Model Runner" in log
        return result | {"log": log}

    def end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
