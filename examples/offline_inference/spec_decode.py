# SPDX-License-Identifier: Apache-2.0
r"""Offline speculative decoding: does it change the text, and what does it gain?

Without arguments it runs the bundled models: no speculation, then a draft model, PARD,
PARD with draft trees, PARD-2, EAGLE-3 and P-EAGLE on the same prompts, and prints one
table. With `--speculative-config`, as for `vllm serve`, it runs only this config, and
no speculation for comparison:

    python spec_decode.py
    python spec_decode.py --model meta-llama/Llama-3.1-8B-Instruct \
        --speculative-config '{"model": "amd/PARD-Llama-3.2-1B"}'

Exit status: 0, or 1 if a greedy output differs from the one without speculation, 2 for
inconsistent flags, 3 if an engine fails.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("spec_decode_engine.py")
MODELS = Path(__file__).resolve().parents[2] / "models"
PLAIN = "no speculation"
BUNDLED = {
    "draft model": "draft",
    "PARD": "pard",
    "PARD, tree": "pard",
    "PARD-2": "pard2",
    "EAGLE-3": "eagle3",
    "P-EAGLE": "peagle",
}
DEFAULT_K = 7
TREE_NODES = 15
PROMPT_LEN = 128
ON_CPU = "cpu" in version("vllm")  # as vLLM detects it
Row = dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="target (default: the bundled one)")
    add("--speculative-config", type=json.loads, metavar="JSON", help="run this alone")
    add("--engine-args", type=json.loads, default={}, metavar="JSON",
        help='more arguments of LLM, as {"tensor_parallel_size": 2}')  # fmt: skip
    add("--bundle", type=Path, default=MODELS, help="folder of the bundled models")
    add("--num-prompts", type=int, default=8, help="pieces of Python's library that "
        "the bundled models have not seen")  # fmt: skip
    add("--output-len", type=int, default=64, help="most tokens of an output")
    add("--temp", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the table as JSON too")
    return parser


def plan_of(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> dict[str, dict[str, Any] | None]:
    """Speculative configs by the names of their rows; fills in defaults of `args`."""
    given, plan = args.speculative_config, {PLAIN: None}
    if given is None:
        if args.model:
            parser.error("--model needs --speculative-config.")
        for name, folder in BUNDLED.items():
            model = str(args.bundle / folder)
            plan[name] = {"model": model, "num_speculative_tokens": DEFAULT_K}
        plan["draft model"]["method"] = "draft_model"  # its files do not say so
        plan["PARD, tree"]["draft_tree"] = TREE_NODES
    elif not isinstance(given, dict):
        parser.error("--speculative-config must be a JSON object.")
    else:
        name = given.get("method") or Path(given.get("model", "speculation")).name
        if "draft_tree" in given:
            name = f"{name}, tree of {given['draft_tree']}"
        plan[name] = given
    is_bundled = args.model is None
    args.model = args.model or str(args.bundle / "target")
    defaults: dict[str, Any] = {"max_num_seqs": 8}
    if ON_CPU:
        defaults["compilation_config"] = {"mode": 0}  # compiling takes longer
    if is_bundled or ON_CPU:
        defaults["gpu_memory_utilization"] = 0.3
    if is_bundled and ON_CPU:
        # In bfloat16 two logits are often equal, and then summation order decides. On a
        # GPU float32 would not help: its attention kernels multiply in TF32.
        defaults["dtype"] = "float32"
    args.engine_args = defaults | args.engine_args
    return plan


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of text from held-out modules, from random unindented lines on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chance, folder = random.Random(args.seed), Path(sysconfig.get_path("stdlib"))
    names = json.loads((args.bundle / "held_out.json").read_text())
    files = [folder / f"{name.replace('.', '/')}.py" for name in names]
    texts = [file.read_text() for file in files if file.is_file()]
    pieces: list[list[int]] = []
    while len(pieces) < args.num_prompts:
        lines = chance.choice(texts).splitlines(keepends=True)
        starts = [i for i, line in enumerate(lines) if not line[0].isspace()]
        text = "".join(lines[chance.choice(starts) :][:PROMPT_LEN])
        tokens = tokenizer(text)["input_ids"][:PROMPT_LEN]
        if len(tokens) == PROMPT_LEN:
            pieces.append(tokens)
    return pieces


def make_job(
    args: argparse.Namespace, name: str, spec: Any, prompts: list[list[int]]
) -> dict[str, Any]:
    engine = {
        "model": args.model,
        "seed": args.seed,
        "speculative_config": spec,
        "disable_log_stats": False,  # acceptance is counted in the stats
        **args.engine_args,
    }
    sampling = {"temperature": args.temp, "max_tokens": args.output_len}
    sampling["seed"] = args.seed
    return {"name": name, "engine": engine, "prompts": prompts, "sampling": sampling}


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Runs the engine in a process of its own, with clean memory and compiler state.

    Raises:
        subprocess.CalledProcessError: it failed; its message is on stderr.
    """
    env = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if ON_CPU:
        env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    print(f"{job['name']}: starting the engine", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, "job.json"), Path(folder, "result.json")]
        files[0].write_text(json.dumps(job))
        command = [sys.executable, str(ENGINE), *map(str, files)]
        # Only the table goes to stdout. The user's environment takes precedence.
        subprocess.run(command, env=env | os.environ, stdout=2, check=True)
        return json.loads(files[1].read_text())


def make_row(name: str, job: dict[str, Any], result: dict[str, Any]) -> Row:
    counters, tokens = result["counters"], sum(map(len, result["token_ids"]))
    drafts = counters.get("num_drafts", [0])[0]
    # Of the drafts that were made at each position: the engine may choose fewer than K.
    made = counters.get("num_draft_tokens_per_pos", [])
    kept = counters.get("num_accepted_tokens_per_pos", [])
    by_position = [accepted / n for accepted, n in zip(kept, made, strict=True) if n]
    accepted = counters["num_accepted_tokens"][0] if drafts else 0
    return {
        "name": name,
        "speculative_config": job["engine"]["speculative_config"],
        "device": result["device"],
        "token_ids": result["token_ids"],
        "acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_by_position": by_position,
        "tokens_per_second": tokens / result["seconds"],
        "ratio": None,
        "identical": None,
    }


def cells(row: Row) -> tuple[str, ...]:
    by_position = row["acceptance_by_position"]
    shown = {True: "yes", False: "NO", None: "-"}[row["identical"]]
    length, ratio = row["acceptance_length"], row["ratio"]
    return (
        row["name"],
        f"{length:.2f}" if length else "-",
        " ".join(f"{share:.2f}".removeprefix("0") for share in by_position) or "-",
        f"{row['tokens_per_second']:.1f}",
        f"{ratio:.2f}" if ratio else "-",
        shown,
    )


def format_table(rows: list[Row]) -> str:
    head = ("drafter", "acceptance length", "by position", "tokens/s", "ratio")
    lines = [(*head, "same text"), *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def run_all(args: argparse.Namespace, plan: dict[str, Any]) -> list[Row]:
    prompts, rows = read_prompts(args), []
    for name, spec in plan.items():
        job = make_job(args, name, spec, prompts)
        row, plain = make_row(name, job, run_engine(job)), rows[0] if rows else None
        if plain:
            row["ratio"] = row["tokens_per_second"] / plain["tokens_per_second"]
        if plain and args.temp == 0:
            row["identical"] = row["token_ids"] == plain["token_ids"]
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        rows = run_all(args, plan_of(args, parser))
    except subprocess.CalledProcessError as error:
        print(f"The engine failed (exit status {error.returncode}).", file=sys.stderr)
        return 3
    print(format_table(rows))
    dtype = args.engine_args.get("dtype", "the model's own dtype")
    at_once = min(args.num_prompts, args.engine_args["max_num_seqs"])
    print(
        f"{rows[0]['device']}, {dtype}, temperature {args.temp:g}, {at_once} requests "
        "at a time."
    )
    if args.speculative_config is None:
        print(
            f"K = {DEFAULT_K} shows how many drafts are accepted, and is more than "
            "pays in a batch; if it is left out, the engine chooses. `vllm bench "
            "drafters --quick` measures that."
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["identical"] is False for row in rows))


if __name__ == "__main__":
    # SIGTERM raises an exception, so that the engine's process is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
