# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` against `vllm serve`, ours and vLLM's release; see README.md."""

import argparse
import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.engine import probe_device
from benchmarks.spec_decode.flags import add_site_flag, check_sites, parse_sites
from benchmarks.spec_decode.plan import RECORDED, Setup, recording, runs_mode
from benchmarks.spec_decode.process import ROOT, last_error
from benchmarks.spec_decode.results import IMPLEMENTATIONS, MAIN_SHAPES, OURS, EngineKey
from benchmarks.spec_decode.shapes import CONFIGS, MODES, PARALLEL, write_shapes
from benchmarks.spec_decode.tokenizer import write_tokenizer

VLLM = ["-m", "benchmarks.spec_decode.api_server"]  # `vllm`, for random weights
# For an LLM in process only: a server has statistics, and a tokenizer.
NOT_SERVED = ("model", "skip_tokenizer_init", "disable_log_stats")
LOAD_S = 240  # a load takes longer only where something hangs
METRICS = ("ttft", "tpot", "itl")
KEPT = (
    "completed",
    "duration",
    "request_throughput",
    "output_throughput",
    *(f"{kind}_{metric}_ms" for kind in ("median", "p99") for metric in METRICS),
)


def as_flags(args: dict[str, Any]) -> list[str]:
    """LLM's arguments as those of `vllm serve`."""
    flags = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value is None or name in NOT_SERVED:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            flags += [f"--{flag}", text]
    return flags


class Server:
    """`vllm serve`, started at once.

    Attributes:
        python, env: the interpreter that it has, and its environment.
        url: where it answers, once it does.
    """

    def __init__(
        self, key: EngineKey, setup: Setup, log: Path, lane: int, recorded: str | None
    ):
        self.log = log
        self.python, self.env = setup.command(key, lane)
        self.env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if recorded is not None:
            self.env["SPEC_DECODE_RECORDING"] = recorded
        port, args = free_port(), setup.llm_args(key)
        self.url = f"http://127.0.0.1:{port}"
        command = [*self.python, *VLLM, "serve", args["model"], "--port", str(port)]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, *as_flags(args)],
                cwd=ROOT,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_health(self, timeout_s: float) -> None:
        """Returns when it answers.

        Raises:
            RuntimeError: it did not start.
        """
        await_health(self.process, self.url, timeout_s, self.log)

    def stop(self) -> None:
        """Asks it to end, then ends it; waits until its memory is free."""
        stop(self.process)


def await_health(
    process: subprocess.Popen, url: str, timeout_s: float, log: Path
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(last_error(log.read_text(errors="replace")))
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
            return
        time.sleep(0.5)
    raise RuntimeError(f"no server within {timeout_s:.0f} s, see {log}")


def stop(process: subprocess.Popen) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def load(
    server: Server, model: Path, args: argparse.Namespace, rate: float
) -> dict[str, Any]:
    """One run of `vllm bench serve`.

    Raises:
        RuntimeError: it failed.
    """
    prompts = args.max_prompts
    if rate != float("inf"):
        prompts = min(prompts, max(4, round(rate * args.seconds)))
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "backend": "openai",
            "base-url": server.url,
            "model": model,
            "dataset-name": "random",
            "random-input-len": args.prompt_len,
            "random-output-len": args.output_len,
            "num-prompts": prompts,
            "num-warmups": args.num_warmups,
            "request-rate": rate,
            "burstiness": args.burstiness,
            "temperature": 0,
            "percentile-metrics": ",".join(METRICS),
            "result-dir": folder,
            "result-filename": "result.json",
        }
        command = [
            *server.python,
            *VLLM,
            "bench",
            "serve",
            "--ignore-eos",
            "--save-result",
        ]
        command += [part for k, v in flags.items() for part in (f"--{k}", str(v))]
        try:
            done = subprocess.run(
                command,
                env=server.env,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=LOAD_S,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no end of the load within {LOAD_S} s") from error
        result = Path(folder, "result.json")
        if done.returncode or not result.is_file():
            raise RuntimeError(last_error(done.stdout + done.stderr))
        found = json.loads(result.read_text())
    return {"num_prompts": prompts, **{name: found.get(name) for name in KEPT}}


class Run:
    """Servers of a mode, up together and measured in turns."""

    def __init__(self, args: argparse.Namespace, setup: Setup, device: dict[str, Any]):
        self.args, self.setup = args, setup
        self.begin = time.monotonic()
        self.label = f"recorded-{args.trace}" if args.trace else ""
        self.name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.logs = Path(tempfile.mkdtemp(prefix="spec_decode_logs_"))
        folder = files.RESULTS / files.slug(args.gpu or device["name"])
        self.path = args.output or folder / "serving.json"
        self.results: files.Results = {section: {} for section in files.SECTIONS}
        run = {"command": files.command_line("serving"), "device": device}
        self.results["runs"][self.name] = run

    def is_over(self) -> bool:
        return time.monotonic() - self.begin > self.args.time_limit

    def measure_mode(self, keys: list[EngineKey]) -> None:
        servers = {key: self.start(key, lane) for lane, key in enumerate(keys)}
        try:
            ready = {k: s for k, s in servers.items() if self.await_ready(k, s)}
            for rate in self.args.request_rate:
                for key in list(ready):
                    if self.is_over():
                        return
                    self.measure(key, rate, ready)
        finally:
            for server in servers.values():
                server.stop()

    def start(self, key: EngineKey, lane: int) -> Server:
        log = self.logs / (str(key).replace("/", "_") + ".log")
        return Server(key, self.setup, log, lane, recording(self.label, key))

    def await_ready(self, key: EngineKey, server: Server) -> bool:
        try:
            server.await_health(self.args.start_timeout)
        except RuntimeError as error:
            self.fail(key, error)
            return False
        print(f"[{time.monotonic() - self.begin:4.0f} s] {key} answers", flush=True)
        return True

    def measure(
        self, key: EngineKey, rate: float, servers: dict[EngineKey, Server]
    ) -> None:
        model = self.setup.models["target"]
        try:
            found = load(servers[key], model, self.args, rate)
        except RuntimeError as error:
            self.fail(key, error)
            servers.pop(key).stop()
            return
        self.record(key, rate, found)

    def fail(self, key: EngineKey, error: Exception) -> None:
        self.results["failures"][str(key)] = {"error": str(error), "run": self.name}
        print(f"{key}: FAILED: {error}", flush=True)
        files.save(self.path, self.results)

    def record(self, key: EngineKey, rate: float, found: dict[str, Any]) -> None:
        print(
            f"[{time.monotonic() - self.begin:4.0f} s] {key} {rate} {found}", flush=True
        )
        point = {**found, "run": self.name}
        label = f"/{self.label}" if self.label else ""
        self.results["measurements"][f"{key}{label}/rate{rate}"] = point
        files.save(self.path, self.results)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add_site_flag(parser)
    add = parser.add_argument
    implementations = list(IMPLEMENTATIONS)
    add(
        "--implementations", nargs="+", choices=implementations, default=implementations
    )
    add("--modes", nargs="+", choices=list(MODES), default=["peagle"])
    add("--num-speculative-tokens", type=int, default=7)
    add(
        "--request-rate",
        type=float,
        nargs="+",
        default=[1, 4, 16, float("inf")],
        help="requests per second; inf sends all at once",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        help="of arrivals: 1 is a Poisson process, less comes in bursts",
    )
    add(
        "--trace",
        choices=list(RECORDED.values()),
        help="replay what the bundled drafters had accepted of greedy or sampled text",
    )
    add("--draft-tree", type=int, help="ours also with a tree of so many nodes")
    add("--seconds", type=float, default=12.0, help="of requests at each rate")
    add("--max-prompts", type=int, default=256, help="requests at each rate, at most")
    add("--num-warmups", type=int, default=8, help="requests before each rate")
    add("--auto", type=int, help="ours also choosing its draft lengths, up to this")
    add("--prompt-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--max-num-seqs", type=int, default=64)
    add("--kv-cache-gib", type=float, default=5.0, help="KV cache of each server")
    add("--shapes", choices=(MAIN_SHAPES, "tiny"), default=MAIN_SHAPES)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--gpu", help="name of the results folder; detected by default")
    add(
        "--output",
        type=Path,
        help="results/<gpu>/serving.json by default",
    )
    add("--time-limit", type=float, default=570.0, help="seconds, then stop cleanly")
    add("--start-timeout", type=float, default=400.0, help="seconds for a server")
    args = parser.parse_args()
    args.site = parse_sites(parser, args.site)
    check_sites(parser, args)
    if args.draft_tree and not args.trace:
        parser.error("--draft-tree needs --trace: a tree's acceptance is recorded")
    return args


def keys_of(mode: str, args: argparse.Namespace) -> list[EngineKey]:
    """The servers of a mode."""
    if mode == "none":
        return [EngineKey(name, mode, 0) for name in args.implementations]
    k = args.num_speculative_tokens
    keys = [
        EngineKey(name, mode, k)
        for name in args.implementations
        if runs_mode(name, mode)
    ]
    if args.draft_tree and mode in PARALLEL:
        keys.append(EngineKey(OURS, mode, k, tree=args.draft_tree))
    if args.auto:
        keys.append(EngineKey(OURS, mode, args.auto, is_auto=True))
    return keys


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        models = write_shapes(args.shapes, Path(folder))
        if args.shapes != "tiny":
            write_tokenizer(
                models["target"], CONFIGS[args.shapes]["target"]["vocab_size"]
            )
        setup = Setup(
            args.site, models, args.device, args.max_num_seqs, args.kv_cache_gib, {}
        )
        device = probe_device(next(iter(args.site.values())), dict(os.environ))
        run = Run(args, setup, device)
        for mode in args.modes:
            if not run.is_over():
                run.measure_mode(keys_of(mode, args))


if __name__ == "__main__":
    main()
