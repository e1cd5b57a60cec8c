# SPDX-License-Identifier: Apache-2.0
"""What the device is called and how fast it copies: prints one line of JSON.

It runs in a process of its own, so that nothing stays on the device.
"""

import json
import time

import torch

import vllm


def copy_bandwidth(device: str, num_bytes: int, repeats: int = 10) -> float:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats):
        _synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / sorted(seconds)[repeats // 2]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def describe() -> dict[str, str | int | float]:
    software = {"torch": torch.__version__, "vllm": vllm.__version__}
    if not torch.cuda.is_available():
        return {
            "name": "cpu",
            "memory_bytes": 0,
            "copy_bytes_per_s": copy_bandwidth("cpu", 1 << 28),
            **software,
        }
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "copy_bytes_per_s": copy_bandwidth("cuda", 4 << 30),
        **software,
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
