# SPDX-License-Identifier: Apache-2.0
"""What the matrix products of a pass take, by the rows of a batch; see README.md."""

import argparse
import datetime
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.device import describe

# Weights of Llama-3.1-8B's layers, which heads share, and of Llama-3.2-1B's: in, out.
SHAPES = {
    "8B gate and up": (4096, 28672),
    "8B down": (14336, 4096),
    "8B q, k, v": (4096, 6144),
    "8B o": (4096, 4096),
    "1B gate and up": (2048, 16384),
    "1B down": (8192, 2048),
}
ROWS = (8, 64, 128, 256, 320, 384, 416, 448, 480, 512, 640, 768, 896, 1024)
REPLAYS = 5
COPIES = 4  # of a weight, so that none stays in the cache
CALLS = 20


def seconds_of(rows: int, size: int, out: int) -> float:
    """Of one product in bfloat16, from replays of a graph of many."""
    made = {"dtype": torch.bfloat16, "device": "cuda"}
    weights = [torch.randn(out, size, **made) for _ in range(COPIES)]
    batch = torch.randn(rows, size, **made)
    F.linear(batch, weights[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(CALLS):
            F.linear(batch, weights[call % COPIES])
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / REPLAYS / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = describe()
    run = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {
        name: {
            "seconds": {rows: seconds_of(rows, *shape) for rows in args.rows},
            "run": run,
        }
        for name, shape in SHAPES.items()
    }
    folder = files.RESULTS / files.slug(device["name"])
    runs = {run: {"command": files.command_line("products"), "device": device}}
    files.save(
        args.output or folder / "products.json", {"runs": runs, "measurements": found}
    )


if __name__ == "__main__":
    main()
