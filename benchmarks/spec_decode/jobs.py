# SPDX-License-Identifier: Apache-2.0
"""Engines that do one job each, in a process of their own, some side by side."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
TRACEBACK = "Traceback (most recent call last)"


class _Running(NamedTuple):
    process: subprocess.Popen
    result: Path
    log: Path


def environment(device: str) -> dict[str, str]:
    """For a process with an engine in it; what is set already stays."""
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    return alone | offline(device) | os.environ


def offline(device: str, threads: int = 1) -> dict[str, str]:
    """What engines of any kind are run with: no network, on a CPU the interpreter."""
    defaults = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        defaults |= {
            "TRITON_INTERPRET": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
    else:
        # Else attention rounds float32 to fewer bits, and how depends on the batch.
        defaults["TRITON_F32_DEFAULT"] = "ieee"
    return defaults


def engine_memory(device: str) -> dict[str, Any]:
    """Arguments of `LLM` with which engines of tiny models share a device."""
    if device == "cpu":
        return {"gpu_memory_utilization": 0.1}
    return {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.02}


def run_jobs(
    program: list[str], jobs: dict[str, Any], device: str, at_once: int = 1
) -> dict[str, Any]:
    """What each job came to, by name.

    Args:
        program: arguments of Python; behind them come two files, of the job as JSON and
            for its result as JSON.

    Raises:
        SystemExit: a job failed; of its log the first traceback and the end are the
            message.
    """
    waiting, running = list(enumerate(jobs)), {}
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    number, name = waiting.pop(0)
                    place = Path(folder, str(number))
                    running[name] = _start(program, jobs[name], device, place)
                time.sleep(POLL_S)
                for name, job in list(running.items()):
                    if job.process.poll() is not None:
                        del running[name]
                        results[name] = _result(name, job)
        finally:
            for job in running.values():
                job.process.kill()
                job.process.wait()
    return results


def _start(program: list[str], job: Any, device: str, place: Path) -> _Running:
    place.mkdir()
    job_file, result, log = (
        place / name for name in ("job.json", "result.json", "log")
    )
    job_file.write_text(json.dumps(job))
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *program, str(job_file), str(result)],
            env=environment(device),
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
        )
    return _Running(process, result, log)


def _result(name: str, job: _Running) -> Any:
    if job.process.returncode:
        log = job.log.read_text(errors="replace")
        # A worker's own error stands far above that of the engine that missed it.
        first = max(log.find(TRACEBACK), 0)
        cause, end = log[first : first + 3000], log[first + 3000 :][-3000:]
        sys.exit(f"{name} failed:\n{cause}\n{end}")
    return json.loads(job.result.read_text())
