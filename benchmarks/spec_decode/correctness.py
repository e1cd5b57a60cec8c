# SPDX-License-Identifier: Apache-2.0
"""Do CUDA graphs change what is drafted or what comes out? The bundled models, greedy.

Each drafter runs with graphs, with an eager drafter, and with all of the engine eager,
on the same prompts as the target alone; if asked, also on two GPUs (`tensor-parallel`,
`local-argmax`), still beside the target on one. Where an output differs from the
target's, the gap between the target's two best logits at that token says whether it
was a tie.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.jobs import run_jobs
from benchmarks.spec_decode.shapes import BUNDLED, MODES

ONE_GPU = ("graphs", "eager-drafter", "eager")
TWO_GPUS = ("tensor-parallel", "local-argmax")
# Chances closer than this are equal as far as bf16 matrix products of another shape
# can tell.
TIE = 0.1


def speculative_config(
    mode: str, how: str, num_tokens: int, folder: Path
) -> dict[str, Any] | None:
    if mode == "none":
        return None
    spec = {**MODES[mode], "model": str(BUNDLED / mode)}
    spec["num_speculative_tokens"] = num_tokens
    if how == "eager-drafter":
        spec["enforce_eager"] = True
    if how in TWO_GPUS and mode == "pard":
        # The bundled PARD has three heads: the draft model's weights, with PARD's mask
        # token, take its place.
        spec["model"] = str(masked_draft_model(folder))
    if how == "local-argmax":
        spec["use_local_argmax_reduction"] = True
    return spec


def masked_draft_model(folder: Path) -> Path:
    place = folder / "masked-draft-model"
    shutil.copytree(BUNDLED / "draft", place)
    config = json.loads((place / "config.json").read_text())
    config["pard_token"] = json.loads((BUNDLED / "pard" / "config.json").read_text())[
        "pard_token"
    ]
    (place / "config.json").write_text(json.dumps(config))
    return place


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


class Replays:
    """Counts draft passes, and the graphs that stood for them."""

    def __init__(self, speculator: Any):
        self.steps = self.graphs = 0
        self.propose, manager = speculator.propose, speculator.graphs
        speculator.propose = self._counted
        if manager is not None:
            self.replay = manager.run_fullgraph
            manager.run_fullgraph = self._replayed

    def _counted(self, *args, **kwargs):
        self.steps += 1
        return self.propose(*args, **kwargs)

    def _replayed(self, desc):
        self.graphs += 1
        return self.replay(desc)


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """One engine over all prompts, together and then some of them alone."""
    from vllm import LLM, SamplingParams

    mode, how = job["mode"], job["how"]
    with tempfile.TemporaryDirectory() as folder:
        spec = speculative_config(mode, how, job["num_tokens"], Path(folder))
        llm = LLM(
            str(BUNDLED / "target"),
            speculative_config=spec,
            enforce_eager=how == "eager",
            tensor_parallel_size=2 if how in TWO_GPUS else 1,
            disable_log_stats=False,
            max_model_len=1024,
            **job["engine"],
        )
    replays = None
    if spec and how in ONE_GPU:  # in process, so the runner itself comes back
        replays = Replays(llm.collective_rpc(lambda w: w.model_runner.speculator)[0])
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["output_len"],
        ignore_eos=True,
        logprobs=2 if mode == "none" else None,
    )
    found = [{"prompt_token_ids": ids} for ids in prompts(job["num_prompts"])]
    outputs = llm.generate(found, sampling, use_tqdm=False)
    for prompt in found[:4]:
        outputs += llm.generate([prompt], sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    by_position = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "gaps": [gaps(output.outputs[0].logprobs) for output in outputs],
        "acceptance": [n / drafts.value for n in by_position.values] if drafts else [],
        "steps": replays and replays.steps,
        "graphs_replayed": replays and replays.graphs,
    }


def gaps(logprobs: list[dict[int, Any]] | None) -> list[float]:
    """By how much the best token's logprob exceeds the second's, at each position."""
    best = [
        sorted(found.values(), key=lambda x: x.rank)[:2] for found in logprobs or ()
    ]
    return [first.logprob - second.logprob for first, second in best]


def compare(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """What of an engine's outcome is kept, beside the target alone."""
    differences = []
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
        "are_ties": all(d["logprob_gap"] < TIE for d in differences),
        "acceptance_length": 1 + sum(found["acceptance"]),
        "acceptance_by_position": found["acceptance"],
        "steps": found["steps"],
        "graphs_replayed": found["graphs_replayed"],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--modes", nargs="+", choices=list(MODES)[1:], default=list(MODES)[1:])
    add("--how", nargs="+", choices=[*ONE_GPU, *TWO_GPUS], default=list(ONE_GPU))
    add("--dtype", default="bfloat16")
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


def run_all(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Outcomes by mode and how; an engine that fails ends the program."""
    memory = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.02}
    if args.device == "cpu":
        memory = {"gpu_memory_utilization": 0.1}
    alone = dict.fromkeys(target_of(how) for how in args.how)
    engines = [("none", how) for how in alone]
    engines += product(args.modes, args.how)
    jobs = {
        f"{mode}-{how}": {
            "mode": mode,
            "how": how,
            "num_tokens": args.num_speculative_tokens,
            "num_prompts": args.num_prompts,
            "output_len": args.output_len,
            "engine": {"dtype": args.dtype, "max_num_seqs": 16, **memory},
        }
        for mode, how in engines
    }
    program = ["-m", "benchmarks.spec_decode.correctness", "--engine"]
    return run_jobs(program, jobs, args.device, args.engines_at_once)


def main() -> None:
    args = parse()
    if args.engine:
        job, result = args.engine
        result.write_text(json.dumps(run_engine(json.loads(job.read_text()))))
        return
    from benchmarks.spec_decode.engine import probe_device

    device = probe_device(str(Path(sys.executable)), dict(os.environ))
    outcomes = run_all(args)
    rows = {}
    for mode, how in product(args.modes, args.how):
        target = outcomes[f"none-{target_of(how)}"]
        rows[f"{mode}-{how}"] = compare(outcomes[f"{mode}-{how}"], target)
    run = {
        "command": files.command_line("correctness"),
        "device": device,
        "dtype": args.dtype,
        "tie": TIE,
    }
    begin = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    folder = files.RESULTS / files.slug(device["name"])
    files.save(
        args.output or folder / "correctness.json",
        {
            "runs": {begin: run},
            "engines": {name: {**row, "run": begin} for name, row in rows.items()},
        },
    )
    for name, row in rows.items():
        print(
            f"{name}: {row['requests'] - len(row['differences'])} of {row['requests']} "
            f"outputs equal{'' if row['are_ties'] else ', NOT all ties'}, acceptance "
            f"length {row['acceptance_length']:.2f}"
        )
    if wrong := [name for name, row in rows.items() if not row["are_ties"]]:
        sys.exit("Outputs that are not the target's: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
