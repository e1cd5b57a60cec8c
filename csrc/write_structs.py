# SPDX-License-Identifier: Apache-2.0
"""Writes the headers: run it after changing a tuple that a native kernel takes."""

from pathlib import Path

import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)
from vllm.v1.worker.gpu.spec_decode.unified.tree import native as draft_tree

HEADERS = {"tree_structs.h": draft_tree.LIBRARY}

if __name__ == "__main__":
    for name, library in HEADERS.items():
        Path(__file__).with_name(name).write_text(library.header())
