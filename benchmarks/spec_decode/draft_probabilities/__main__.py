# SPDX-License-Identifier: Apache-2.0
"""Acceptance length without and with draft probabilities, by temperature.

Each bundled drafter continues held-out prompts. Without draft probabilities it drafts
the likeliest token, with them it draws its drafts as the target draws tokens. Every
request runs a fixed number of steps, so that long steps are not cut off more often.
"""

import argparse
import platform
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode import shapes
from benchmarks.spec_decode.draft_probabilities.mean import mean_length
from benchmarks.spec_decode.jobs import engine_memory, run_jobs

ENGINE = ["-m", "benchmarks.spec_decode.draft_probabilities.engine"]
MODES = shapes.modes_of("tiny")[1:]  # those that are bundled
METHODS = ("greedy", "probabilistic")
TEMPERATURES = [0.0, 0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0]


def make_job(args: argparse.Namespace, mode: str, method: str) -> dict[str, Any]:
    return {
        "held_out": str(args.models / "held_out.json"),
        "temperatures": args.temperatures,
        "prompts": args.prompts,
        "prompt_len": args.prompt_len,
        "steps": args.steps,
        "num_speculative_tokens": args.num_speculative_tokens,
        "engine": {
            "model": str(args.models / "target"),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": args.prompts,
            **engine_memory(args.device),
            "speculative_config": {
                "model": str(args.models / mode),
                **shapes.MODES[mode],
                "num_speculative_tokens": args.num_speculative_tokens,
                "draft_sample_method": method,
            },
        },
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.draft_probabilities",
        description=__doc__,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cpu")
    add("--models", type=Path, default=shapes.BUNDLED)
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    add("--num-speculative-tokens", type=int, default=4)
    add("--prompts", type=int, default=48, help="that run at the same time")
    add("--prompt-len", type=int, default=64)
    add("--steps", type=int, default=8, help="of each request")
    add("--engines-at-once", type=int, default=1)
    add("--output", type=Path)
    return parser.parse_args(arguments)


def settings(args: argparse.Namespace) -> dict[str, str]:
    """What was measured, and not where it lay."""
    places = ("models", "output")
    return {k: str(value) for k, value in vars(args).items() if k not in places}


def main() -> None:
    args = parse()
    start = time.strftime("%Y-%m-%dT%H:%M:%S")
    jobs = {
        f"{mode}/{method}": make_job(args, mode, method)
        for mode, method in product(args.modes, METHODS)
    }
    results = run_jobs(ENGINE, jobs, args.device, args.engines_at_once)
    for name, found in results.items():
        device = found["device"]
        path = args.output or files.RESULTS / device / "draft_probabilities.json"
        measurements = {
            f"{name}/K{args.num_speculative_tokens}/T{temperature}": mean_length(counts)
            for temperature, counts in found["counts"].items()
        }
        run = {
            "command": files.command_line("draft_probabilities"),
            "vllm": found["vllm"],
            "software": f"Python {platform.python_version()}, torch {found['torch']}",
            "settings": settings(args),
        }
        files.save(path, files.of_run(start, run, "measurements", measurements))
        for key, point in measurements.items():
            length, error = point["acceptance_length"], point["standard_error"]
            print(f"{key}: {length:.3f} ± {error:.3f}", flush=True)


if __name__ == "__main__":
    main()
