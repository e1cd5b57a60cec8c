# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` of this interpreter's own install, its counters and its memory."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.spec_decode.jobs import offline
from benchmarks.spec_decode.process import ROOT
from benchmarks.spec_decode.serving import (
    as_flags,
    await_health,
    free_port,
    stop,
)

CLI = ["-m", "vllm.entrypoints.cli.main"]
MODEL = "target"  # the name it is served under


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen
    url: str
    log: Path

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of all metrics of vLLM."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                if name.startswith("vllm:"):
                    yield name.removeprefix("vllm:"), labels, value

    def metrics(self) -> dict[str, float]:
        """Values by name, summed over labels."""
        found: dict[str, float] = {}
        for name, labels, value in self.samples():
            if name == "cache_config_info":
                name, value = "num_gpu_blocks", int(labels["num_gpu_blocks"])
            found[name] = found.get(name, 0) + value
        return found

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def resident_bytes(self) -> dict[str, int]:
        """By name of its processes; pages that they share count for each."""
        found: dict[str, int] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                name = process.name()
                found[name] = found.get(name, 0) + process.memory_info().rss
        return found

    def gpu_bytes(self) -> int:
        """Of its processes on the first visible GPU."""
        from vllm.platforms import current_platform
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        number = current_platform.visible_device_id_to_physical_device_id(0)
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        own = {process.pid for process in self.processes()}
        users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return sum(user.usedGpuMemory or 0 for user in users if user.pid in own)


def environment(device: str, threads: int) -> dict[str, str]:
    """For processes that run an engine; what is set already stays."""
    defaults = {"TOKENIZERS_PARALLELISM": "false"}
    if device == "cpu":
        # Else the workers of all servers are bound to the same cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return defaults | offline(device, threads) | os.environ


@contextlib.contextmanager
def serve(
    engine: dict[str, Any], env: dict[str, str], log: Path, timeout_s: float
) -> Iterator[Server]:
    """A healthy server, ended at the end.

    Args:
        engine: arguments as `LLM` takes them.

    Raises:
        RuntimeError: it did not start.
    """
    url = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, *CLI, "serve", engine["model"]]
    command += ["--served-model-name", MODEL, "--disable-uvicorn-access-log"]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, *as_flags(engine)],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        await_health(process, url, timeout_s, log)
        yield Server(process, url, log)
    finally:
        stop(process)


def answers_of_target(job: dict[str, Any], env: dict[str, str], folder: Path) -> Any:
    """What `alone.py` says.

    Raises:
        RuntimeError: it failed; the log's end is the message.
    """
    files = [folder / "alone-job.json", folder / "alone-result.json"]
    files[0].write_text(json.dumps(job))
    env = env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if env.get("TRITON_INTERPRET") == "1":  # native kernels are far faster
        env |= {"TRITON_INTERPRET": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.alone", *map(str, files)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the target alone failed:\n{done.stderr[-3000:]}")
    return json.loads(files[1].read_text())
