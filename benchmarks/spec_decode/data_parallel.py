# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks, one of them idle most of the time: the target's own output?

Ranks run in step only with a mixture of experts, so the bundled target becomes one:
experts that are all the target's own. The last rank has little to do, and then joins in
with batches of nothing while the other one drafts. Each rank is a process with a device
of its own. Where vLLM's communicator cannot exchange tokens, as on a CPU (`--device
cpu`), `exchange.py` does.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.correctness import TIES, compare, gaps, prompts
from benchmarks.spec_decode.drafter import drafter_name
from benchmarks.spec_decode.jobs import run_jobs
from benchmarks.spec_decode.serving import free_port
from benchmarks.spec_decode.shapes import BUNDLED, MODES

RANKS, EXPERTS = 2, 4
EXCHANGE = "benchmarks.spec_decode.exchange.Exchange"
PROGRAM = ["-m", "benchmarks.spec_decode.data_parallel", "--rank"]


def write_target(folder: Path) -> Path:
    """The bundled target as a mixture of experts: a Qwen3-MoE, which EAGLE-3 can tap.

    Its norms of queries and keys only come close to none, so that it says other things
    than the bundled target, and drafters agree less often.
    """
    shutil.copytree(BUNDLED / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    dense, weights = load_file(folder / "model.safetensors"), {}
    for name, tensor in dense.items():
        if ".mlp." not in name:
            weights[name] = tensor
            continue
        for expert in range(EXPERTS):
            own = name.replace(".mlp.", f".mlp.experts.{expert}.")
            weights[own] = tensor.clone()
    torch.manual_seed(0)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        router = torch.randn(EXPERTS, config["hidden_size"])
        weights[f"{layer}mlp.gate.weight"] = router.bfloat16()
        scale = dense[f"{layer}input_layernorm.weight"].float()
        for part in "qk":
            projection = dense[f"{layer}self_attn.{part}_proj.weight"].float()
            usual = (projection * scale).square().sum(1).mean().sqrt()
            norm = usual.expand(config["head_dim"]).bfloat16()
            weights[f"{layer}self_attn.{part}_norm.weight"] = norm.contiguous()
    save_file(weights, folder / "model.safetensors")
    return folder


def run_rank(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, in a group of ranks or alone, over the prompts that are its own."""
    os.environ.update(job["environment"])
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["target"],
        speculative_config=job["speculative_config"],
        disable_log_stats=False,
        max_model_len=512,
        worker_extension_cls=EXCHANGE,
        **job["engine"],
    )
    llm.collective_rpc(prepare)
    sampling = SamplingParams(
        temperature=0, max_tokens=job["output_len"], ignore_eos=True, logprobs=2
    )
    found = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    outputs = llm.generate(found, sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = metrics.get("vllm:spec_decode_num_drafts")
    by_position = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "gaps": [gaps(output.outputs[0].logprobs) for output in outputs],
        "drafts": drafts.value if drafts else 0,
        "accepted": by_position.values if drafts else [],
        "watched": None,
        **llm.collective_rpc(describe)[0],
    }


def prepare(worker: Any) -> None:
    """Counts idle batches; in the worker, which may be a process of its own."""
    worker.idle_batches, run = 0, worker.execute_dummy_batch

    def counted() -> None:
        worker.idle_batches += 1
        run()

    worker.execute_dummy_batch = counted


def describe(worker: Any) -> dict[str, Any]:
    drafter = getattr(worker.model_runner, "speculator", None)
    return {
        "drafter": drafter_name(drafter),
        "idle_batches": worker.idle_batches,
    }


def rank_environment(rank: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(RANKS),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def run_all(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """What engines came to by name: the target alone, and each rank of each mode."""
    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
    if args.device == "cpu":
        memory = {"gpu_memory_utilization": 0.1, "enforce_eager": True}
    given = prompts(args.num_prompts)
    base = {
        "target": str(write_target(folder / "target")),
        "output_len": args.output_len,
        # So few that one rank goes on long after the other.
        "engine": {"dtype": args.dtype, "max_num_seqs": 4, **memory},
    }
    alone = base | {"speculative_config": None, "environment": {}, "prompts": given}
    jobs = {"alone": alone}
    for mode in args.modes:
        port = free_port()
        spec = MODES[mode] | {"model": str(BUNDLED / mode)}
        spec["num_speculative_tokens"] = args.num_speculative_tokens
        if args.auto:
            spec["num_speculative_tokens_per_batch_size"] = "auto"
        for rank, own in enumerate((given[1:], given[:1])):
            jobs[f"{mode}-rank-{rank}"] = base | {
                "speculative_config": spec,
                "environment": rank_environment(rank, port),
                "prompts": own,
            }
    first = run_jobs(PROGRAM, {"alone": jobs.pop("alone")}, args.device)
    return first | run_jobs(PROGRAM, jobs, args.device, at_once=RANKS)


def judge(mode: str, found: dict[str, dict[str, Any]], tie: float) -> dict[str, Any]:
    """A mode's ranks together, beside the target alone."""
    busy, idle = (found[f"{mode}-rank-{rank}"] for rank in range(RANKS))
    together = busy | {"tokens": idle["tokens"] + busy["tokens"]}
    return {
        **compare(together, found["alone"], tie),
        "drafter": busy["drafter"],
        "idle_batches": idle["idle_batches"],
    }


def faults(name: str, row: dict[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    found = [] if row["are_ties"] else [f"{name}: not the target's output"]
    if row["idle_batches"] < 10:
        found.append(f"{name}: the idle rank ran {row['idle_batches']} batches only")
    if row["acceptance_length"] < 1.1:
        found.append(f"{name}: acceptance length {row['acceptance_length']:.2f}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.data_parallel", description=__doc__
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--modes", nargs="+", choices=list(MODES)[1:], default=list(MODES)[1:])
    add("--dtype", choices=TIES, default="bfloat16")
    add("--num-speculative-tokens", type=int, default=5)
    add("--auto", action="store_true", help="ranks agree on how far to draft")
    add("--num-prompts", type=int, default=12)
    add("--output-len", type=int, default=48)
    add("--output", type=Path)
    add("--rank", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.rank:
        job, result = args.rank
        result.write_text(json.dumps(run_rank(json.loads(job.read_text()))))
        return
    from benchmarks.spec_decode.engine import probe_device

    device = probe_device(str(Path(sys.executable)), dict(os.environ))
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_all(args, Path(folder))
    tie = TIES[args.dtype]
    rows = {mode: judge(mode, outcomes, tie) for mode in args.modes}
    place = files.RESULTS / files.slug(device["name"]) / "data-parallel.json"
    run = {
        "command": files.command_line("data_parallel"),
        "device": device,
        "dtype": args.dtype,
        "ranks": RANKS,
    }
    begin = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    files.save(args.output or place, files.of_run(begin, run, "engines", rows))
    wrong = []
    for mode, row in rows.items():
        same = row["requests"] - len(row["differences"])
        print(
            f"{mode}: {same} of {row['requests']} outputs equal, acceptance length "
            f"{row['acceptance_length']:.2f}, {row['idle_batches']} idle batches"
        )
        wrong += faults(mode, row)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
