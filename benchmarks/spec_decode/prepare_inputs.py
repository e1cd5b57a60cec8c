# SPDX-License-Identifier: Apache-2.0
"""Our input kernel against the base's chains of launches; see README.md.

Runs with our install alone, which holds the base's functions too. Batches of a long
prompt beside many decodes are measured as well, against the time that the prompt and
the decodes take alone: a results file of its own, `prepare_inputs_mixed.json`.
"""

import argparse
import datetime
import itertools
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.chains import NUM_SOURCES, Chain, layout_of, make_chain
from benchmarks.spec_decode.decode_step import bytes_moved, make_step
from benchmarks.spec_decode.device import describe
from benchmarks.spec_decode.gpu_profile import count_launches
from benchmarks.spec_decode.prepare_inputs_batch import first_pass
from benchmarks.spec_decode.shapes import MODES
from vllm.v1.worker.gpu.spec_decode.unified.inputs import prepare_inputs

AHEAD_CYCLES = 4_000_000  # keeps the device busy while a chain is being launched


def measure(chain: Chain, repeats: int, device: torch.device) -> dict[str, Any]:
    """Device time back to back, and what launching costs the host, both in seconds."""
    for _ in range(3):
        chain()
    if device.type != "cuda":
        return {"device_s": None, "host_s": median(_timed(chain, repeats))}
    pairs = [_queued(chain) for _ in range(repeats)]
    return {
        "device_s": median(device_s for device_s, _ in pairs),
        "host_s": median(host_s for _, host_s in pairs),
        "launches": count_launches(chain),
    }


def _timed(chain: Chain, repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        chain()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _queued(chain: Chain) -> tuple[float, float]:
    """(device, host) seconds of a chain that is launched behind other work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    started = time.perf_counter()
    chain()
    host_s = time.perf_counter() - started
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def floor_s(mode: str, n: int, k: int, hidden_size: int, bytes_per_s: float) -> float:
    """Seconds for what a first pass must read and write."""
    row = NUM_SOURCES.get(mode, 0) * hidden_size * 2
    return bytes_moved(layout_of(mode, k), n, k + 1, row) / bytes_per_s


def measure_all(args: argparse.Namespace, device: dict[str, Any]) -> files.Results:
    """Every mode, pass, batch size and K; the key names them all."""
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {}
    for n, k in itertools.product(args.batch_size, args.num_speculative_tokens):
        step = make_step(n, k, args.hidden_size, max(n, args.max_num_reqs), where)
        for mode, which, name in itertools.product(
            args.modes, ("first", "later"), files.IMPLEMENTATIONS
        ):
            chain = make_chain(name, mode, which, step, k)
            if chain is None:
                continue
            key = f"{name}/{mode}/{which}/K{k}/n{n}"
            found[key] = measure(chain, args.repeats, where)
            if which == "first":
                found[key]["floor_s"] = floor_s(
                    mode, n, k, args.hidden_size, device["copy_bytes_per_s"]
                )
            print(key, found[key], flush=True)
    return {"measurements": found}


def measure_mixed(
    mode: str, k: int, num_decodes: int, prompt: int, args: argparse.Namespace
) -> dict[str, Any]:
    """A prompt, decodes of K + 1 tokens, and both in one batch.

    The ratio is that of device times; on a CPU, of the host's.
    """
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = (NUM_SOURCES[mode], args.hidden_size) if mode in NUM_SOURCES else ()
    decodes = [k + 1] * num_decodes
    found: dict[str, Any] = {}
    batches = {"prompt": [prompt], "decodes": decodes, "mixed": [prompt, *decodes]}
    for name, query_lens in batches.items():
        most = max(args.max_num_reqs, len(decodes) + 1)
        given = first_pass(layout_of(mode, k), query_lens, most, where, *states)
        found[name] = measure(partial(prepare_inputs, **given), args.repeats, where)
    clock = "device_s" if where.type == "cuda" else "host_s"
    alone = found["prompt"][clock] + found["decodes"][clock]
    return found | {"ratio": found["mixed"][clock] / alone}


def measure_all_mixed(args: argparse.Namespace) -> files.Results:
    found: dict[str, Any] = {}
    for mode, k, n, prompt in itertools.product(
        args.modes, args.num_speculative_tokens, args.mixed_decodes, args.mixed_prompt
    ):
        key = f"{mode}/K{k}/n{n}/p{prompt}"
        found[key] = measure_mixed(mode, k, n, prompt, args)
        print(key, found[key], flush=True)
    return {"measurements": found}


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
    name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    folder = files.RESULTS / files.slug(args.gpu or str(device["name"]))
    path = args.output or folder / "prepare_inputs.json"
    command = files.command_line("prepare_inputs")
    mixed = path.with_stem(f"{path.stem}_mixed")
    for file, results in (
        (path, measure_all(args, device)),
        (mixed, measure_all_mixed(args)),
    ):
        for entry in results["measurements"].values():
            entry["run"] = name
        results["runs"] = {name: {"command": command, "device": device}}
        files.save(file, results)


if __name__ == "__main__":
    main()
