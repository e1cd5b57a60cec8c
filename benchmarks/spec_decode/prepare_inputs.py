# SPDX-License-Identifier: Apache-2.0
"""The input kernel: from a verified step to a draft batch; see README.md.

Decode batches, and batches of a long prompt beside many decodes, which are compared
with the time that the two take alone.
"""

import argparse
import datetime
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.device import describe
from benchmarks.spec_decode.gpu_profile import count_launches
from benchmarks.spec_decode.prepare_inputs_batch import bytes_moved, first_pass
from benchmarks.spec_decode.shapes import MODES, PARALLEL
from vllm.v1.worker.gpu.spec_decode.unified.inputs import prepare_inputs
from vllm.v1.worker.gpu.spec_decode.unified.layout import DraftLayout

EAGLE = ("eagle3", "peagle")
# States of a token that a drafter is fed: three layers', or those that PARD-2 projects.
NUM_SOURCES = {"pard2": 1, "eagle3": 3, "peagle": 3}
AHEAD_CYCLES = 4_000_000  # keeps the device busy while a launch is on its way


def layout_of(mode: str, num_drafts: int) -> DraftLayout:
    width = num_drafts if mode in PARALLEL else 1
    return DraftLayout(num_drafts, int(mode in EAGLE), width)


def measure(call: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Device time back to back, and what launching costs the host, both in seconds."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        return {"host_s": median(_timed(call) for _ in range(repeats))}
    pairs = [_queued(call) for _ in range(repeats)]
    return {
        "device_s": median(device_s for device_s, _ in pairs),
        "host_s": median(host_s for _, host_s in pairs),
        "launches": count_launches(call),
    }


def _timed(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _queued(call: Callable[[], None]) -> tuple[float, float]:
    """(device, host) seconds of a call behind other work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    host_s = _timed(call)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def measure_batch(
    mode: str, k: int, query_lens: list[int], args: argparse.Namespace
) -> dict[str, Any]:
    """A batch of requests with so many target tokens each."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = (NUM_SOURCES[mode], args.hidden_size) if mode in NUM_SOURCES else ()
    most = max(args.max_num_reqs, len(query_lens))
    given = first_pass(layout_of(mode, k), query_lens, most, device, *states)
    return measure(partial(prepare_inputs, **given), args.repeats)


def measure_decodes(args: argparse.Namespace, bytes_per_s: float) -> dict[str, Any]:
    """Every mode, batch size and K."""
    found = {}
    sizes = itertools.product(args.batch_size, args.num_speculative_tokens)
    for (n, k), mode in itertools.product(sizes, args.modes):
        key, row = f"{mode}/K{k}/n{n}", NUM_SOURCES.get(mode, 0) * args.hidden_size * 2
        found[key] = measure_batch(mode, k, [k + 1] * n, args)
        moved = bytes_moved(layout_of(mode, k), n, k + 1, row)
        found[key]["floor_s"] = moved / bytes_per_s
        print(key, found[key], flush=True)
    return found


def measure_mixed(args: argparse.Namespace) -> dict[str, Any]:
    """A prompt beside decodes, and the ratio of its time to that of both alone."""
    clock = "device_s" if torch.cuda.is_available() else "host_s"
    found = {}
    for mode, k, n, prompt in itertools.product(
        args.modes, args.num_speculative_tokens, args.mixed_decodes, args.mixed_prompt
    ):
        key, decodes = f"{mode}/K{k}/n{n}/p{prompt}", [k + 1] * n
        found[key] = measure_batch(mode, k, [prompt, *decodes], args)
        alone = [measure_batch(mode, k, part, args) for part in ([prompt], decodes)]
        found[key]["to_both_alone"] = found[key][clock] / sum(p[clock] for p in alone)
        print(key, found[key], flush=True)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    drafting = [mode for mode in MODES if mode != "none"]
    add = parser.add_argument
    add("--modes", nargs="+", choices=drafting, default=drafting)
    add("--batch-size", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    add("--num-speculative-tokens", type=int, nargs="+", default=[3, 7, 11])
    add("--hidden-size", type=int, default=4096)
    add("--max-num-reqs", type=int, default=256)
    add("--mixed-decodes", type=int, nargs="*", default=[63, 255])
    add("--mixed-prompt", type=int, nargs="*", default=[2048, 8192])
    add("--repeats", type=int, default=50)
    add("--gpu", help="name of the results folder; detected by default")
    add("--output", type=Path, help="results file")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        import vllm.v1.worker.cpu.shm  # noqa: F401  (what Runner V2 needs on a CPU)
    device = describe()
    found = measure_decodes(args, device["copy_bytes_per_s"]) | measure_mixed(args)
    begin = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run = {"command": files.command_line("prepare_inputs"), "device": device}
    folder = files.RESULTS / files.slug(args.gpu or str(device["name"]))
    results = files.of_run(begin, run, "measurements", found)
    files.save(args.output or folder / "prepare_inputs.json", results)


if __name__ == "__main__":
    main()
