# SPDX-License-Identifier: Apache-2.0
"""Do CUDA graphs change what is drafted or what comes out? The bundled models, greedy.

Each drafter runs with graphs, with draft lengths that change with the batch (by a
schedule, and chosen by the engine), with an eager drafter, and with all of the engine
eager, on the same prompts as the target alone; if asked, also by two ranks on GPUs or
cores of their own (`tensor-parallel`, `local-argmax`, `shared-logits`), still beside
the target on one. Where an output differs from the target's, the gap between its
two best logits at that token says whether it was a tie. What stood for draft passes
is counted, and whether the host waited for the device in them: see `draft_watch.py`.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.even_heads import with_even_heads
from benchmarks.spec_decode.jobs import engine_memory, run_jobs
from benchmarks.spec_decode.shapes import BUNDLED, MODES, modes_of

ONE_RANK = ("graphs", "schedule", "auto", "eager-drafter", "eager")
# The last draws drafts, for which ranks exchange whole logits.
TWO_RANKS = ("tensor-parallel", "local-argmax", "shared-logits")
DRAFTING = modes_of("tiny")[1:]
# Logprobs closer than this are equal as far as matrix products of another shape can
# tell: a step of logits between 16 and 32 is 0.125 in bfloat16, 0.016 in float16.
TIES = {"bfloat16": 0.13, "float16": 0.017, "float32": 1e-3}
MAX_NUM_SEQS = 16


def speculative_config(
    mode: str, how: str, num_tokens: int, even: dict[str, Path]
) -> dict[str, Any] | None:
    """A drafter's config; `even` has the drafters that two ranks can share."""
    if mode == "none":
        return None
    drafter = even[mode] if how in TWO_RANKS else BUNDLED / mode
    spec = {**MODES[mode], "model": str(drafter)}
    spec["num_speculative_tokens"] = num_tokens
    if how == "eager-drafter":
        spec["enforce_eager"] = True
    if how == "schedule":
        spec["num_speculative_tokens_per_batch_size"] = schedule(num_tokens)
    if how == "auto":
        spec["num_speculative_tokens_per_batch_size"] = "auto"
    if how == "shared-logits":
        spec["draft_sample_method"] = "probabilistic"
    if how == "local-argmax":
        spec["use_local_argmax_reduction"] = True
    return spec


def schedule(num_tokens: int) -> list[list[int]]:
    """Draft lengths by batch size: none at first, more as requests end."""
    few, some = MAX_NUM_SEQS // 4, MAX_NUM_SEQS // 2
    return [
        [1, few, num_tokens],
        [few + 1, some, num_tokens // 2],
        [some + 1, MAX_NUM_SEQS, 0],
    ]


def prompts(num_prompts: int) -> list[list[int]]:
    """Pieces of held-out modules of the standard library, all of other lengths."""
    import sysconfig

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "target")
    library, tokens = Path(sysconfig.get_path("stdlib")), []
    for name in json.loads((BUNDLED / "held_out.json").read_text()):
        if (file := library / f"{name}.py").is_file():
            tokens += tokenizer(file.read_text(), add_special_tokens=False).input_ids
    return [
        tokens[at : at + 16 + 13 * i] for i, at in enumerate(range(0, 997 * 99, 997))
    ][:num_prompts]


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """One engine over all prompts, together and then some of them alone."""
    if job["how"] in TWO_RANKS:
        # Only a CPU reads it; without it ranks want a NUMA node each.
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    from benchmarks.spec_decode.draft_watch import DraftWatch
    from vllm import LLM, SamplingParams

    how, spec = job["how"], job["speculative_config"]
    llm = LLM(
        str(BUNDLED / "target"),
        speculative_config=spec,
        enforce_eager=how == "eager",
        tensor_parallel_size=2 if how in TWO_RANKS else 1,
        disable_log_stats=False,
        max_model_len=1024,
        **job["engine"],
    )
    watch = None
    if spec and how in ONE_RANK:  # in process, so the runner itself comes back
        watch = DraftWatch(llm.collective_rpc(lambda w: w.model_runner.speculator)[0])
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["output_len"],
        ignore_eos=True,
        logprobs=None if spec else 2,
    )
    found = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(found, sampling, use_tqdm=False)
    for prompt in found[:4]:
        outputs += llm.generate([prompt], sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    by_position = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "gaps": [gaps(output.outputs[0].logprobs) for output in outputs],
        "drafts": int(drafts.value) if drafts else 0,
        "accepted": list(by_position.values) if drafts else [],
        "watched": watch and watch.describe(),
    }


def gaps(logprobs: list[dict[int, Any]] | None) -> list[float]:
    """By how much the best token's logprob exceeds the second's, at each position."""
    best = [
        sorted(found.values(), key=lambda x: x.rank)[:2] for found in logprobs or ()
    ]
    return [first.logprob - second.logprob for first, second in best]


def compare(found: dict[str, Any], alone: dict[str, Any], tie: float) -> dict[str, Any]:
    """What of an engine's outcome is kept, beside the target alone."""
    differences, drafts = [], max(found["drafts"], 1)
    rates = [n / drafts for n in found["accepted"]]
    for request, (tokens, wanted) in enumerate(
        zip(found["tokens"], alone["tokens"], strict=True)
    ):
        if tokens != wanted:
            at = next(
                i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b
            )
            gap = alone["gaps"][request][at]
            differences.append({"request": request, "token": at, "logprob_gap": gap})
    return {
        "requests": len(found["tokens"]),
        "differences": differences,
        "tie": tie,
        "are_ties": all(d["logprob_gap"] < tie for d in differences),
        "acceptance_length": 1 + sum(rates),
        "acceptance_by_position": rates,
        "drafts": found["drafts"],
        **(found["watched"] or {}),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--modes", nargs="+", choices=DRAFTING, default=DRAFTING)
    add("--how", nargs="+", choices=[*ONE_RANK, *TWO_RANKS], default=list(ONE_RANK))
    add("--dtype", choices=TIES, default="bfloat16")
    add(
        "--prompts",
        type=Path,
        help="JSON of prompts' token ids, written if there is none: pieces of the "
        "standard library, which differs between versions of Python",
    )
    add("--num-speculative-tokens", type=int, default=7)
    add("--num-prompts", type=int, default=24)
    add("--output-len", type=int, default=100)
    add("--engines-at-once", type=int, default=5)
    add("--output", type=Path)
    add("--engine", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def target_of(how: str) -> str:
    """How the target alone runs beside an engine: eager kernels round differently."""
    return "eager" if how == "eager" else "graphs"


def read_prompts(args: argparse.Namespace) -> list[list[int]]:
    if args.prompts and args.prompts.is_file():
        return json.loads(args.prompts.read_text())[: args.num_prompts]
    found = prompts(args.num_prompts)
    if args.prompts:
        args.prompts.write_text(json.dumps(found))
    return found


def run_all(
    args: argparse.Namespace, prompts: list[list[int]]
) -> dict[str, dict[str, Any]]:
    """Outcomes by mode and how; an engine that fails ends the program.

    Drafters are written here, not where an engine starts: that process is to fork its
    ranks, which hang if PyTorch's threads have run before.
    """
    engine = {"dtype": args.dtype, "max_num_seqs": MAX_NUM_SEQS}
    engine |= engine_memory(args.device)
    alone = dict.fromkeys(target_of(how) for how in args.how)
    engines = [("none", how) for how in alone]
    engines += product(args.modes, args.how)
    program = ["-m", "benchmarks.spec_decode.correctness", "--engine"]
    with tempfile.TemporaryDirectory() as folder:
        shared = args.modes if set(args.how) & set(TWO_RANKS) else []
        even = {mode: with_even_heads(BUNDLED / mode, Path(folder)) for mode in shared}
        jobs = {
            f"{mode}-{how}": {
                "how": how,
                "speculative_config": speculative_config(
                    mode, how, args.num_speculative_tokens, even
                ),
                "prompts": prompts,
                "output_len": args.output_len,
                "engine": engine,
            }
            for mode, how in engines
        }
        return run_jobs(program, jobs, args.device, args.engines_at_once)


def compare_all(
    args: argparse.Namespace, outcomes: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What is kept of every engine; those not of bfloat16 are named by their dtype."""
    suffix = "" if args.dtype == "bfloat16" else f"-{args.dtype}"
    return {
        f"{mode}-{how}{suffix}": compare(
            outcomes[f"{mode}-{how}"],
            outcomes[f"none-{target_of(how)}"],
            TIES[args.dtype],
        )
        for mode, how in product(args.modes, args.how)
    }


def say(rows: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        print(
            f"{name}: {row['requests'] - len(row['differences'])} of {row['requests']} "
            f"outputs equal{'' if row['are_ties'] else ', NOT all ties'}, acceptance "
            f"length {row['acceptance_length']:.2f}, steps {row.get('steps')}, graphs "
            f"{row.get('graphs_replayed')}, waits {row.get('waiting_steps')} "
            f"{row.get('waited_at')}, drafted {row.get('drafted')}"
        )


def judge(results: files.Results) -> None:
    """Ends the program with 1 if anything is not as it must be."""
    from benchmarks.spec_decode.correctness_tables import is_noise, pairs

    rows = results["engines"].items()
    if wrong := [name for name, row in rows if not row["are_ties"]]:
        sys.exit("Outputs that are not the target's: " + ", ".join(wrong))
    cpu = files.load(files.RESULTS / "cpu" / "correctness.json")
    apart = [n for n, one, other in pairs(results, cpu) if not is_noise(one, other)]
    if apart:
        sys.exit("Acceptance is not that of the CPU: " + ", ".join(apart))


def main() -> None:
    args = parse()
    if args.engine:
        job, result = args.engine
        result.write_text(json.dumps(run_engine(json.loads(job.read_text()))))
        return
    from benchmarks.spec_decode.engine import probe_device

    device = probe_device(str(Path(sys.executable)), dict(os.environ))
    found = read_prompts(args)
    rows = compare_all(args, run_all(args, found))
    run = {
        "command": files.command_line("correctness"),
        "device": device,
        "dtype": args.dtype,
        # Of the same prompts or not: what acceptance may be compared with.
        "prompts": hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16],
        "output_len": args.output_len,
    }
    begin = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    folder = files.RESULTS / files.slug(device["name"])
    results = files.of_run(begin, run, "engines", rows)
    files.save(args.output or folder / "correctness.json", results)
    say(rows)
    judge(results)


if __name__ == "__main__":
    main()
