# SPDX-License-Identifier: Apache-2.0
r"""Speculative decoding, offline: does it change the text, and what does it gain?

Without arguments it runs the bundled models: no speculation, then a draft model,
PARD, PARD-2, EAGLE-3 and P-EAGLE on the same prompts, and prints one table. With
`--method` it runs that one configuration, and no speculation to compare with:

    python spec_decode.py
    python spec_decode.py --method eagle3 --model-dir meta-llama/Llama-3.1-8B-Instruct \
        --eagle-dir yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --num-spec-tokens 3

Exit status: 0, or 1 where a greedy output differs from the one without speculation,
2 for flags that do not fit together, 3 where an engine fails.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_decode_flags import (
    Drafting,
    UsageError,
    checked_plan,
    make_parser,
    runs_on_cpu,
)
from spec_decode_prompts import PromptError, load_prompts
from spec_decode_report import exit_status, format_table, make_row, remarks

ENGINE = Path(__file__).with_name("spec_decode_engine.py")


class EngineError(RuntimeError):
    """An engine failed. Its own message is on stderr already."""


def engine_environment(cpu: bool) -> dict[str, str]:
    """What an engine's process gets; anything the user has set stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if cpu:
        # Triton's interpreter runs the GPU's kernels, and with them Runner V2.
        defaults |= {"TRITON_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return defaults | os.environ


def make_job(
    args: argparse.Namespace, drafting: Drafting, prompts: list[list[int]]
) -> dict[str, Any]:
    engine = {
        "model": args.model_dir,
        "dtype": args.dtype,
        "seed": args.seed,
        "tensor_parallel_size": args.tp,
        "enforce_eager": args.enforce_eager,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "speculative_config": drafting.speculative_config(),
        "disable_log_stats": False,  # the acceptance counters are among the stats
        "use_tqdm_on_load": False,
    }
    if args.gpu_memory_utilization is not None:
        engine["gpu_memory_utilization"] = args.gpu_memory_utilization
    sampling = {
        "temperature": args.temp,
        "top_p": args.top_p,
        "max_tokens": args.output_len,
    }
    return {
        "name": drafting.name,
        "engine": engine,
        "prompts": prompts,
        "sampling": [{**sampling, "seed": args.seed + i} for i in range(len(prompts))],
    }


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job in a process of its own."""
    print(f"{job['name']}: starting the engine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "job.json"), Path(folder, "result.json")]
        files[0].write_text(json.dumps(job))
        command = [sys.executable, str(ENGINE), *map(str, files)]
        # Only the table goes to stdout.
        done = subprocess.run(command, env=engine_environment(runs_on_cpu()), stdout=2)
        if done.returncode:
            raise EngineError(
                f"{job['name']}: the engine failed (exit status {done.returncode}); "
                "its message is above."
            )
        return json.loads(files[1].read_text())


def print_outputs(name: str, result: dict[str, Any]) -> None:
    for prompt, text in zip(result["prompts"], result["texts"], strict=True):
        print(f"--- {name}\nPrompt: {prompt!r}\nOutput: {text!r}")


def tokenized_prompts(args: argparse.Namespace) -> list[list[int]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_dir)
    except (OSError, ValueError) as error:
        raise PromptError(f"{args.model_dir}: no tokenizer. {error}") from error
    prompts = load_prompts(args, args.bundle / "held_out.json", tokenizer)
    longest, limit = max(map(len, prompts)), args.max_model_len
    if limit and longest >= limit:
        raise PromptError(
            f"A prompt has {longest} tokens: --max-model-len {limit} leaves no room "
            f"for an output. Set it to {longest + args.output_len} or more."
        )
    if len(prompts) < args.num_prompts:
        print(f"The dataset has {len(prompts)} prompts only.", file=sys.stderr)
    return prompts


def make_report(args: argparse.Namespace, plan: list[Drafting]) -> dict[str, Any]:
    start = time.perf_counter()
    prompts = tokenized_prompts(args)
    rows: list[dict[str, Any]] = []
    baseline = None
    for drafting in plan:
        result = run_engine(make_job(args, drafting, prompts))
        if args.print_output:
            print_outputs(drafting.name, result)
        rows.append(make_row(drafting, result, baseline, greedy=args.temp == 0))
        baseline = result if drafting.method == "none" else baseline
    settings = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
    }
    settings["num_prompts"] = len(prompts)
    seconds = time.perf_counter() - start
    return {"settings": settings, "seconds": seconds, "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    args = parser.parse_args(argv)
    try:
        report = make_report(args, checked_plan(args))
    except (UsageError, PromptError) as error:
        parser.error(str(error))
    except EngineError as error:
        print(error, file=sys.stderr)
        return 3
    print("\n".join([format_table(report["rows"]), *remarks(report)]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return exit_status(report["rows"])


if __name__ == "__main__":
    # An exception, so that a terminated example takes its engine with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
