# SPDX-License-Identifier: Apache-2.0
"""The input kernel on a CPU: the native one against Triton's interpreter.

Times the first draft pass of a decode step, in which every request has K + 1 target
tokens and each mode drafts K tokens at once, and writes the medians as JSON.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton

import torch

import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)
from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.prepare_inputs_batch import first_pass
from tools.overlay.base import load_config
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    native_library,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

RESULT = Path(__file__).parents[1] / "results" / "cpu" / "prepare-inputs.json"
# token_shift, and hidden states to copy: sources x hidden size, float32.
MODES = {"pard": (0, 0, 0), "p-eagle": (1, 3, 1024)}


def decode_step(mode: str, num_reqs: int, num_drafts: int) -> dict[str, Any]:
    """Arguments of `prepare_inputs` for the first pass of a decode step."""
    shift, *states = MODES[mode]
    layout, cpu = DraftLayout(num_drafts, shift, num_drafts), torch.device("cpu")
    query_lens = [num_drafts + 1] * num_reqs
    return first_pass(layout, query_lens, num_reqs, cpu, *states, torch.float32)


def median_us(call: Callable[[], None], runs: int) -> float:
    """Median of several runs in microseconds, after one to warm up."""
    call()
    seconds = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds) * 1e6, 1)


def measure(mode: str, num_reqs: int, num_drafts: int, runs: int) -> dict[str, Any]:
    call = partial(prepare_inputs, **decode_step(mode, num_reqs, num_drafts))
    native = median_us(partial(call, native=True), 50 * runs)
    interpreted = median_us(partial(call, native=False), runs)
    return {
        "mode": mode,
        "batch_size": num_reqs,
        "num_speculative_tokens": num_drafts,
        "native_us": native,
        "interpreter_us": interpreted,
        "speedup": round(interpreted / native, 1),
    }


def cpu_model() -> str:
    """The name in /proc/cpuinfo, where there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--num-spec-tokens", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--runs", type=int, default=9, help="of the interpreter")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if native_library() is None:
        raise SystemExit("error: there is no native kernel to measure.")
    torch.set_num_threads(1)
    rows = []
    for mode in MODES:
        for num_drafts in args.num_spec_tokens:
            for num_reqs in args.batch_sizes:
                rows.append(measure(mode, num_reqs, num_drafts, args.runs))
                print(rows[-1], flush=True)
    result = {
        "command": files.command_line("prepare_inputs_cpu"),
        "base": f"vllm {load_config()['version']}",
        "cpu": cpu_model(),
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
        "date": datetime.date.today().isoformat(),
        "unit": "median microseconds a call, launcher included, one thread",
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
