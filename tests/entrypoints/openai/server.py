# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` in a subprocess, and reads its metrics and memory."""

import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm.utils.network_utils import get_open_port

HOST = "127.0.0.1"
MODEL = "target"  # the name it is served under
START_SECONDS, STOP_SECONDS = 180, 30
IDLE_SECONDS = 60  # for the server to notice that clients disconnected


class Server(contextlib.AbstractContextManager):
    """A `vllm serve` process: healthy inside the context, killed after it."""

    def __init__(self, model: Path, flags: list[str], env: dict[str, str], log: Path):
        self.log = log
        self.url = f"http://{HOST}:{get_open_port()}"
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(model), f"--served-model-name={MODEL}", f"--host={HOST}"]
        command += [f"--port={self.url.rpartition(':')[2]}", *flags]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, env=env, stdout=file, stderr=subprocess.STDOUT
            )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none")

    def __enter__(self) -> Self:
        try:
            self.wait_until_healthy()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        """Kills all its processes, also after a failed test."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get("/health")
                return
            time.sleep(0.5)
        pytest.fail(f"not healthy in {START_SECONDS} s:\n{self.log.read_text()}")

    def terminate(self) -> tuple[int, list[psutil.Process]]:
        """Exit status after SIGTERM, and child processes that are still alive."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=STOP_SECONDS)
        _, alive = psutil.wait_procs(children, timeout=5)
        return status, alive

    def samples(self) -> Iterator[Sample]:
        """Samples of all vLLM metrics."""
        for family in text_string_to_metric_families(self.get("/metrics")):
            yield from (s for s in family.samples if s.name.startswith("vllm:"))

    def metrics(self) -> dict[str, float]:
        """Values by name, summed over labels."""
        found: dict[str, float] = {}
        for sample in self.samples():
            name, value = sample.name.removeprefix("vllm:"), sample.value
            if name == "cache_config_info":
                name, value = "num_gpu_blocks", int(sample.labels["num_gpu_blocks"])
            found[name] = found.get(name, 0) + value
        return found

    def resident_bytes(self) -> int:
        """RSS of all its processes; shared pages count for each."""
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def gpu_bytes(self) -> int:
        """GPU memory of its processes on the first visible GPU; 0 without a GPU."""
        from vllm.platforms import current_platform
        from vllm.third_party import pynvml

        if not current_platform.is_cuda():
            return 0
        pynvml.nvmlInit()
        number = current_platform.visible_device_id_to_physical_device_id(0)
        handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        own = {process.pid for process in self._processes()}
        users = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return sum(user.usedGpuMemory or 0 for user in users if user.pid in own)

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def wait_until_idle(self) -> dict[str, Any]:
        """Requests and KV cache blocks that a server without clients still holds.

        Metrics are those of the last step, so a request for one token triggers a step.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            self.client.completions.create(model=MODEL, prompt=[1], max_tokens=1)
            time.sleep(0.5)
            found = self.metrics()
            requests = found["num_requests_running"] + found["num_requests_waiting"]
            blocks = round(found["kv_cache_usage_perc"] * (found["num_gpu_blocks"] - 1))
            if not (requests or blocks) or time.monotonic() > deadline:
                return {"stuck_requests": int(requests), "leaked_blocks": blocks}
