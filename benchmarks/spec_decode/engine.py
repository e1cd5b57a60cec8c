# SPDX-License-Identifier: Apache-2.0
"""Compares engines of this tree and of vLLM's release on one device; see README.md."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.acceptance import (
    EQUAL,
    RECORDED,
    expected_length,
    recording,
)
from benchmarks.spec_decode.plan import GIB, any_schedule, engine_of, is_shared
from benchmarks.spec_decode.results import MAIN_CONTEXT, OURS, EngineKey, PointKey
from benchmarks.spec_decode.run import last_error, start_process, stop_process
from benchmarks.spec_decode.side_by_side import SideBySide, check, make_parser

WARM_UP_TOKENS = 24
ANSWER_S = 180
PROFILED_STEPS = 10
# For Llama-3.1-8B and the largest of its drafters, in bf16.
KV_BYTES_PER_TOKEN = 164 << 10


class WorkerProcess:
    """The benchmark's handle of a `Worker` in a process of its own, started at once."""

    def __init__(
        self, python: list[str], env: dict[str, str], job: dict[str, Any], log: Path
    ):
        self.log = log
        self.pipe, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            command = [*python, "-m", "benchmarks.spec_decode.worker", str(number)]
            self.process = start_process(command, env, log, pass_fds=[number])
        self.pipe.send(job)

    def await_ready(self, timeout_s: float) -> dict[str, Any]:
        """Returns the worker's next answer.

        Raises:
            RuntimeError: the answer is an error, or there is none in time.
        """
        if not self.pipe.poll(timeout_s):
            raise RuntimeError(f"no answer within {timeout_s:.0f} s, see {self.log}")
        try:
            answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            log = self.log.read_text(errors="replace")
            raise RuntimeError(last_error(log)) from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, timeout_s: float, request: dict[str, Any]) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):  # reading the answer raises
            self.pipe.send(request)
        return self.await_ready(timeout_s)

    def stop(self) -> None:
        stop_process(self.process)
        self.pipe.close()


class EngineBenchmark(SideBySide):
    """Rounds of requests that arrive together, on in-process LLM engines."""

    def start(self, key: EngineKey, lane: int) -> WorkerProcess:
        engine, args = self.setup.llm_args(key), self.args
        if is_shared(key, args) and not key.is_auto:
            schedule = {"num_speculative_tokens_per_batch_size": any_schedule(args)}
            engine["speculative_config"] |= schedule
        is_replayed = bool(args.trace) and key.mode != "none"
        job = {"engine": engine, "is_replayed": is_replayed}
        log = self.logs / (str(key).replace("/", "_") + ".log")
        return WorkerProcess(*self.setup.command(key, lane), job, log)

    def measure_all(self, engines: dict[EngineKey, WorkerProcess]) -> None:
        choosing = [
            engine
            for key, engine in engines.items()
            if key.implementation == OURS and (key.is_auto or key.is_adaptive)
        ]
        for engine in dict.fromkeys(choosing):  # several keys may share one
            engine.ask(ANSWER_S, {"command": "time_steps"})
        for number, acceptance in enumerate(self.args.acceptance):
            rounds = product(range(self.args.repeats), self.loads(), list(engines))
            for repeat, (context, concurrency), key in rounds:
                if self.run.is_over():
                    return
                if key in engines:
                    point = PointKey(key, acceptance, concurrency, context)
                    self.measure(point, engines, repeat)
            if number == 0:
                self.profile_all(engines)

    def loads(self) -> Iterator[tuple[int, int]]:
        """Contexts and concurrencies whose tokens fit into the KV cache."""
        room = self.args.kv_cache_gib * GIB / KV_BYTES_PER_TOKEN
        for context, concurrency in product(self.args.context, self.args.concurrency):
            if concurrency * (context + self.args.output_len) <= room:
                yield context, concurrency
            else:
                what = f"{concurrency} requests of {context} tokens"
                self.run.say(f"{what} do not fit: raise --kv-cache-gib")

    def request(self, point: PointKey) -> dict[str, Any]:
        """The arguments of a worker's round."""
        key = point.engine
        is_told = is_shared(key, self.args)
        num_drafts = None if key.is_auto else key.tree or key.num_tokens
        return {
            "concurrency": point.concurrency,
            "prompt_len": point.context,
            "output_len": self.args.output_len,
            "recording": recording(point.acceptance, key),
            "told": (num_drafts, key.is_adaptive) if is_told else None,
        }

    def measure(
        self, point: PointKey, engines: dict[EngineKey, WorkerProcess], repeat: int
    ) -> None:
        engine = engines[point.engine]
        request = self.request(point) | {"command": "measure", "number": repeat}
        try:
            if repeat == 0:  # compiles and autotunes for this batch size
                engine.ask(ANSWER_S, request | {"output_len": WARM_UP_TOKENS})
            self.record(point, engine.ask(ANSWER_S, request))
        except RuntimeError as error:
            self.run.fail(point, error)
            engine.stop()
            for key in [key for key in engines if engines[key] is engine]:
                del engines[key]

    def record(self, point: PointKey, found: dict[str, Any]) -> None:
        key = point.engine
        if is_shared(key, self.args):  # depths of its trees are those of its engine
            depth = engine_of(key, self.args).num_tokens
            key = key._replace(is_auto=True, num_tokens=depth)
        length = expected_length(point.acceptance, key, found["drafted"])
        if length and found["mean_step_s"]:
            steps_per_s = point.concurrency / found["mean_step_s"]
            found["expected_tokens_per_s"] = steps_per_s * length
        before = self.run.results.get("measurements", {}).get(str(point), {})
        entry = {
            "acceptance_length": length or found["tokens_per_step"],
            "repeats": [*before.get("repeats", []), found],
        }
        self.run.record("measurements", point, entry)
        times = {name: found[name] for name in ("step_s", "draft_s") if found[name]}
        shown = [f"{name[:-2]} {s * 1e3:.2f} ms" for name, s in times.items()]
        tokens = f"{found['tokens_per_s']:.1f} tokens/s"
        self.run.say(f"{point}: " + ", ".join([tokens, *shown]))

    def profile_all(self, engines: dict[EngineKey, WorkerProcess]) -> None:
        acceptance, context = self.args.acceptance[0], self.args.context[0]
        todo = {"command": "profile", "num_steps": PROFILED_STEPS}
        for concurrency, key in product(self.args.profile, engines):
            if self.run.is_over():
                return
            point = PointKey(key, acceptance, concurrency, context)
            try:
                found = engines[key].ask(ANSWER_S, self.request(point) | todo)
                self.run.record("profiles", point, found)
                self.run.say(f"{point}: profiled")
            except RuntimeError as error:
                self.run.fail(point, error)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("engine", __doc__)
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    add("--context", type=int, nargs="+", default=[MAIN_CONTEXT], metavar="L",
        help="tokens of a prompt")  # fmt: skip
    add("--output-len", type=int, default=256)
    add("--share-engines", action="store_true", help="engines of ours that differ "
        "only in how much they draft are one; needs --trace")  # fmt: skip
    add("--repeats", type=int, default=3)
    add("--profile", type=int, nargs="+", default=[],
        help="profile at these concurrencies too")  # fmt: skip
    args = parser.parse_args(arguments)
    check(parser, args)
    if args.share_engines and not args.trace:
        parser.error("--share-engines needs --trace")
    args.acceptance = [RECORDED + text for text in args.trace] or [EQUAL]
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        EngineBenchmark("engine", args, Path(folder)).measure_groups()


if __name__ == "__main__":
    main()
