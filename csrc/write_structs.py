# SPDX-License-Identifier: Apache-2.0
"""Writes structs.h: run it after a change of a tuple that the input kernel takes."""

from pathlib import Path

import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)
from vllm.v1.worker.gpu.spec_decode.unified.native import header

if __name__ == "__main__":
    Path(__file__).with_name("structs.h").write_text(header())
