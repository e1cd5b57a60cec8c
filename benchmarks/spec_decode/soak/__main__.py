# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with a drafter under many clients: is every answer the target's own?

Clients ask for random lengths, streamed and not, with stop strings, and some leave in
the middle. The KV cache is so small that requests are preempted all the time. Traffic
comes in rounds; every other one ends with all clients leaving at once. After each the
server must be idle with every KV block free, and its memory is noted.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.correctness import TIES
from benchmarks.spec_decode.engine import probe_device
from benchmarks.spec_decode.jobs import engine_memory
from benchmarks.spec_decode.shapes import BUNDLED, MODES
from benchmarks.spec_decode.soak.asks import Answer, Asks
from benchmarks.spec_decode.soak.clients import IDLE_S, Traffic
from benchmarks.spec_decode.soak.server import (
    MODEL,
    Server,
    answers_of_target,
    environment,
    serve,
)

BLOCK = 32  # tokens
MIB = 1 << 20
FIGURES = (
    "requests",
    "whole",
    "aborted",
    "disconnected",
    "tokens",
    "ties",
    "tokens_after_ties",
    "wrong_answers",
    "wrong_tokens",
    "errors",
)


def engine_args(args: argparse.Namespace) -> dict[str, Any]:
    """Of the target, with and without a drafter."""
    longest = args.longest_prompt + args.longest_output
    return {
        "model": str(args.model),
        "dtype": args.dtype,
        "enforce_eager": args.device == "cpu",
        "max_model_len": longest,
        **engine_memory(args.device),
        **args.engine_args,
    }


def pressed(args: argparse.Namespace) -> dict[str, Any]:
    """A server whose KV cache holds some of the requests that it runs."""
    return {
        "block_size": BLOCK,
        "max_num_seqs": args.max_num_seqs,
        "num_gpu_blocks_override": args.kv_blocks,
        "enable_prefix_caching": True,
    }


def speculative_config(args: argparse.Namespace, mode: str) -> dict[str, Any] | None:
    if mode == "none":
        return None
    config = {**MODES[mode], "model": str(args.models / mode)}
    config["num_speculative_tokens"] = args.num_speculative_tokens
    return args.speculative_config or config


def idle_moment(server: Server, device: str) -> dict[str, Any]:
    """What a server without requests still holds.

    Counters are as of the last step, so a request of one token makes one.
    """
    probe = {"model": MODEL, "prompt": [1], "max_tokens": 1}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(probe).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + IDLE_S
    while True:
        urllib.request.urlopen(request, timeout=IDLE_S).read()
        time.sleep(0.5)
        found = server.metrics()
        requests = found["num_requests_running"] + found["num_requests_waiting"]
        blocks = round(found["kv_cache_usage_perc"] * (found["num_gpu_blocks"] - 1))
        if not (requests or blocks) or time.monotonic() > deadline:
            resident = server.resident_bytes()
            return {
                "stuck_requests": int(requests),
                "leaked_blocks": blocks,
                "rss_bytes": sum(resident.values()),
                "rss_by_process": resident,
                "gpu_bytes": None if device == "cpu" else server.gpu_bytes(),
            }


def growth(moments: list[dict[str, Any]], name: str) -> int | None:
    """Bytes from the first of some idle moments to the last."""
    first, last = moments[0][name], moments[-1][name]
    return None if first is None else last - first


def later(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The moments from half time on: allocators take long to settle, a leak never."""
    return moments[(len(moments) - 1) // 2 :]


def soak(server: Server, asks: Asks, args: argparse.Namespace) -> dict[str, Any]:
    traffic = Traffic(server.url, asks, TIES[args.dtype])
    begin, moments = time.monotonic(), []
    for number in range(args.rounds):
        all_leave = number % 2 == 1
        seconds = args.seconds / args.rounds
        asyncio.run(traffic.round(args.clients, seconds, all_leave))
        moments.append(idle_moment(server, args.device))
    found = server.metrics()
    drafts = found.get("spec_decode_num_drafts_total", 0)
    accepted = found.get("spec_decode_num_accepted_tokens_total", 0)
    return {
        "seconds": time.monotonic() - begin,
        **{name: traffic.counts[name] for name in FIGURES},
        "preemptions": int(found["num_preemptions_total"]),
        "prefix_cache_hits": int(found["prefix_cache_hits_total"]),
        "acceptance_length": 1 + accepted / max(drafts, 1),
        "stuck_requests": max(moment["stuck_requests"] for moment in moments),
        "leaked_blocks": max(moment["leaked_blocks"] for moment in moments),
        "rss_growth_bytes": growth(moments, "rss_bytes"),
        "gpu_growth_bytes": growth(moments, "gpu_bytes"),
        "rss_late_growth_bytes": growth(later(moments), "rss_bytes"),
        "gpu_late_growth_bytes": growth(later(moments), "gpu_bytes"),
        "idle_moments": moments,
        "complaints": traffic.complaints,
    }


def faults(found: dict[str, Any], max_growth: int) -> list[str]:
    """What is not as it should be; nothing, if all is well."""
    zero = ("wrong_tokens", "errors", "stuck_requests", "leaked_blocks")
    wrong = [f"{found[name]} {name}" for name in zero if found[name]]
    for name in ("rss_late_growth_bytes", "gpu_late_growth_bytes"):
        if (found[name] or 0) > max_growth:
            wrong.append(f"{name} is {found[name]}")
    # Traffic that missed what it is for shows nothing.
    seen = ("whole", "aborted", "disconnected", "preemptions", "prefix_cache_hits")
    return wrong + [f"no {name}" for name in seen if not found[name]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spec_decode.soak",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--modes", nargs="+", choices=list(MODES), default=["pard", "peagle"])
    add("--seconds", type=float, default=300.0, help="of traffic for each mode")
    add("--clients", type=int, default=64)
    add("--rounds", type=int, default=5, help="idle moments, one after each")
    # In any other, ties are many, and what follows one cannot be compared.
    add("--dtype", choices=TIES, default="float32")
    add("--num-speculative-tokens", type=int, default=7)
    add("--leaving", type=float, default=0.3, help="share of clients that leave")
    add("--prompts", type=int, default=192, help="different ones")
    add("--longest-prompt", type=int, default=192, help="tokens")
    add("--longest-output", type=int, default=128, help="tokens")
    add("--max-num-seqs", type=int, default=32)
    add("--kv-blocks", type=int, default=97, help=f"KV cache, blocks of {BLOCK} tokens")
    add("--models", type=Path, default=BUNDLED, help="folder of target and drafters")
    add("--model", type=Path, help="another target, for --speculative-config")
    add("--speculative-config", type=json.loads, help="JSON, over --modes' own")
    add("--engine-args", type=json.loads, default={}, help="more of LLM, as JSON")
    add("--threads", type=int, default=1, help="of an engine on a CPU")
    add("--max-growth-mib", type=float, default=128.0, help="from half time on")
    add("--start-timeout", type=float, default=400.0, help="seconds for a server")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="results/<gpu>/soak.json by default")
    args = parser.parse_args(arguments)
    args.model = args.model or args.models / "target"
    return args


def asks_of(args: argparse.Namespace, env: dict[str, str], folder: Path) -> Asks:
    from transformers import AutoTokenizer

    job = {
        "engine": engine_args(args),
        "held_out": str(BUNDLED / "held_out.json"),
        "prompts": args.prompts,
        "longest_prompt": args.longest_prompt,
        "longest_output": args.longest_output,
    }
    found = answers_of_target(job, env, folder)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    return Asks([Answer(**one) for one in found], tokenizer, args.leaving, args.seed)


def say(mode: str, found: dict[str, Any], wrong: list[str]) -> None:
    keys = (*FIGURES, "preemptions", "stuck_requests", "leaked_blocks")
    figures = ", ".join(f"{name} {found[name]}" for name in keys)
    growths = ", ".join(
        f"{name} {found[f'{name}_growth_bytes'] / MIB:+.1f} MiB"
        for name in ("rss", "gpu")
        if found[f"{name}_growth_bytes"] is not None
    )
    print(f"{mode}: {figures}, {growths}: {'; '.join(wrong) or 'all well'}", flush=True)
    for complaint in found["complaints"]:
        print(f"  {complaint[:2000]}")


def main() -> None:
    args = parse()
    # So that a server does not outlive a run that is terminated.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    env = environment(args.device, args.threads)
    device = probe_device(sys.executable, dict(os.environ))
    path = args.output or files.RESULTS / files.slug(device["name"]) / "soak.json"
    begin, bad = time.strftime("%Y-%m-%dT%H:%M:%S%z"), False
    run = {"command": files.command_line("soak"), "device": device}
    folder = Path(tempfile.mkdtemp(prefix="soak_"))
    print(f"results: {path}, logs: {folder}", flush=True)
    asks = asks_of(args, env, folder)
    for mode in args.modes:
        engine = engine_args(args) | pressed(args)
        engine["speculative_config"] = speculative_config(args, mode)
        log = folder / f"{mode}.log"
        with serve(engine, env, log, args.start_timeout) as server:
            found = soak(server, asks, args)
        wrong = faults(found, int(args.max_growth_mib * MIB))
        bad |= bool(wrong)
        say(mode, found, wrong)
        about = {"dtype": args.dtype, "tie": TIES[args.dtype]}
        about |= {"clients": args.clients, "faults": wrong}
        rows = {mode: about | found}
        files.save(path, files.of_run(begin, run, "measurements", rows))
    sys.exit(bad)


if __name__ == "__main__":
    main()
