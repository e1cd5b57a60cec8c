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
from tools.overlay.base import load_config
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode.unified.buffers import DraftBuffers
from vllm.v1.worker.gpu.spec_decode.unified.inputs import (
    HiddenRows,
    VerifiedBatch,
    native_library,
    prepare_inputs,
)
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

RESULT = Path(__file__).parents[1] / "results" / "cpu" / "prepare-inputs.json"
CPU = torch.device("cpu")
BLOCK_SIZE, CONTEXT = 16, 512  # tokens of a KV block; positions before the step
# token_shift, and hidden states to copy: sources x hidden size, float32.
MODES = {"pard": (0, 0, 0), "p-eagle": (1, 3, 1024)}


def decode_step(
    mode: str, num_reqs: int, num_drafts: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of `prepare_inputs` for the first pass of a decode step."""
    shift, num_sources, hidden_size = MODES[mode]
    layout = DraftLayout(num_drafts, shift, num_drafts)
    query_len = num_drafts + 1
    num_tokens = num_reqs * query_len
    sources = tuple(torch.randn(num_tokens, hidden_size) for _ in range(num_sources))
    hidden = None
    if sources:
        hidden = HiddenRows(sources, torch.randn(num_sources * hidden_size))
    buffers = DraftBuffers(layout, num_tokens, num_reqs, CPU)
    buffers.allocate_kv_groups(1)
    arguments = make_batch(num_reqs, query_len), layout, buffers, make_tables(num_reqs)
    return arguments, {
        "num_samples": num_drafts,
        "num_padded_tokens": num_reqs * (query_len + layout.num_extra_slots),
        "limit": 2 * CONTEXT,
        "hidden": hidden,
    }


def make_batch(num_reqs: int, query_len: int) -> VerifiedBatch:
    """A step in which each request has half of its drafts rejected."""
    num_tokens = num_reqs * query_len
    each = torch.ones(num_reqs, dtype=torch.int32)
    return VerifiedBatch(
        input_ids=torch.arange(num_tokens, dtype=torch.int32),
        positions=CONTEXT + torch.arange(num_tokens) % query_len,
        query_start_loc=torch.arange(num_reqs + 1, dtype=torch.int32) * query_len,
        idx_mapping=torch.arange(num_reqs),
        num_sampled=each * (query_len - query_len // 2),
        num_rejected=each * (query_len // 2),
        last_sampled=torch.arange(num_reqs)[:, None],
        next_prefill_tokens=each,
        temperature=torch.zeros(num_reqs),
        seeds=torch.arange(num_reqs),
    )


def make_tables(num_reqs: int) -> BlockTables:
    width = 2 * CONTEXT // BLOCK_SIZE
    tables = BlockTables([BLOCK_SIZE], num_reqs, 2 * CONTEXT, [width], CPU)
    ids = torch.arange(1, num_reqs * width + 1, dtype=torch.int32)
    tables.block_tables[0].gpu.copy_(ids.view(num_reqs, width))
    tables.num_blocks.np[:] = width
    tables.num_blocks.copy_to_uva()
    return tables


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
    arguments, keywords = decode_step(mode, num_reqs, num_drafts)
    call = partial(prepare_inputs, *arguments, **keywords)
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
