# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve` on servers of this tree and of vLLM's release; see README.md.

Flags that are not listed here go to `vllm bench serve`.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.plan import llm_args, python_for
from benchmarks.spec_decode.results import ROOT, EngineKey
from benchmarks.spec_decode.side_by_side import SideBySide, check, make_parser
from benchmarks.spec_decode.traces import RECORDED, recording
from vllm.benchmarks.drafters.processes import (
    last_error,
    start_process,
    stop_process,
)

VLLM = ["-m", "benchmarks.spec_decode.api_server"]  # `vllm`, for dummy weights
# Only for an in-process LLM: a server has statistics and a tokenizer.
NOT_SERVED = ("model", "skip_tokenizer_init", "disable_log_stats")
LOAD_S = 240  # a load takes longer only if something hangs
METRICS = ("ttft", "tpot", "itl")
KEPT = (
    "completed",
    "duration",
    "request_throughput",
    "output_throughput",
    *(f"{kind}_{metric}_ms" for kind in ("median", "p99") for metric in METRICS),
)


def as_flags(args: dict[str, Any]) -> list[str]:
    """Arguments of LLM as flags of `vllm serve`."""
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`vllm serve`, started at once; it answers at `url`.

    Args:
        python: command line of the interpreter.
        engine: arguments of LLM.
    """

    def __init__(
        self, python: list[str], engine: dict[str, Any], env: dict[str, str], log: Path
    ):
        self.command, self.env, self.log = [*python, *VLLM], env, log
        self.model, port = engine["model"], free_port()
        self.url, self.begin = f"http://127.0.0.1:{port}", time.monotonic()
        serve = ["serve", self.model, "--port", str(port), *as_flags(engine)]
        self.process = start_process([*self.command, *serve], env, log, cwd=ROOT)

    def await_ready(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the server answers; returns its version and start-up time.

        Raises:
            RuntimeError: it did not start.
        """
        while time.monotonic() - self.begin < timeout_s:
            if self.process.poll() is not None:
                raise RuntimeError(last_error(self.log.read_text(errors="replace")))
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health").close()
                with urllib.request.urlopen(f"{self.url}/version") as version:
                    found = {"vllm": json.load(version)["version"]}
                return found | {"start_s": time.monotonic() - self.begin}
            time.sleep(0.5)
        raise RuntimeError(f"no server within {timeout_s:.0f} s, see {self.log}")

    def bench(self, flags: list[str]) -> dict[str, Any]:
        """One run of `vllm bench serve`.

        Raises:
            RuntimeError: it failed.
            subprocess.TimeoutExpired: it hung.
        """
        with tempfile.TemporaryDirectory() as folder:
            command = [*self.command, "bench", "serve", "--save-result"]
            command += ["--base-url", self.url, "--model", self.model]
            command += ["--percentile-metrics", ",".join(METRICS), *flags]
            command += ["--result-dir", folder, "--result-filename", "result.json"]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            done = subprocess.run(
                command, env=self.env, cwd=ROOT, text=True, timeout=LOAD_S, **output
            )
            result = Path(folder, "result.json")
            if done.returncode or not result.is_file():
                raise RuntimeError(last_error(done.stdout))
            found = json.loads(result.read_text())
        return {name: found.get(name) for name in KEPT}

    def stop(self) -> None:
        self.process.terminate()
        stop_process(self.process)


class ServingBenchmark(SideBySide):
    """Servers that run together; at each rate they get their load in turns."""

    @property
    def label(self) -> str:
        return RECORDED + self.args.trace[0] if self.args.trace else ""

    def start(self, key: EngineKey, lane: int) -> Server:
        python, env = python_for(key, self.args, lane)
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        if (recorded := recording(self.label, key)) is not None:
            env["SPEC_DECODE_RECORDING"] = recorded
        return Server(python, llm_args(key, self.args), env, self.log(key))

    def await_ready(self, engine: Server, timeout_s: float) -> dict[str, Any]:
        return engine.await_ready(timeout_s)

    def measure_all(self, engines: dict[EngineKey, Server]) -> None:
        for rate, key in product(self.args.request_rate, list(engines)):
            if self.run.is_over():
                return
            load = " ".join([f"rate{rate}", *self.args.bench_flags])
            point = "/".join(filter(None, [str(key), self.label, load]))
            if key not in engines:
                continue
            try:
                found = engines[key].bench(load_flags(self.args, rate))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                self.run.fail(point, error)
                engines.pop(key).stop()
                continue
            self.run.record("measurements", point, found)
            self.run.say(f"{point}: {found['output_throughput']:.1f} tokens/s")


def load_flags(args: argparse.Namespace, rate: float) -> list[str]:
    """Flags of `vllm bench serve`; the caller's come last, and take precedence."""
    prompts = args.max_prompts
    if rate != float("inf"):
        prompts = min(prompts, max(4, round(rate * args.seconds)))
    flags = {
        "backend": "openai",
        "dataset-name": "random",
        "random-input-len": 128,
        "random-output-len": 256,
        "num-prompts": prompts,
        "num-warmups": 8,
        "request-rate": rate,
        "temperature": 0,
    }
    given = [part for k, v in flags.items() for part in (f"--{k}", str(v))]
    return [*given, "--ignore-eos", *args.bench_flags]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("serving", __doc__)
    parser.set_defaults(modes=["peagle"], num_speculative_tokens=[7])
    add = parser.add_argument
    add("--request-rate", type=float, nargs="+", default=[1, 4, 16, float("inf")],
        help="a second, a Poisson process; inf sends all at once")  # fmt: skip
    add("--seconds", type=float, default=12.0, help="of requests at each rate")
    add("--max-prompts", type=int, default=256, help="requests at each rate, at most")
    args, args.bench_flags = parser.parse_known_args(arguments)
    check(parser, args)
    if len(args.trace) > 1:
        parser.error("--trace: a server replays one recording")
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        ServingBenchmark("serving", args, Path(folder)).measure_groups()


if __name__ == "__main__":
    main()
