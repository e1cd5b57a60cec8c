# SPDX-License-Identifier: Apache-2.0
"""Engines of ours and of vLLM's release side by side on one device; see README.md.

Several engines are loaded at once and measured strictly one at a time, in turns, so
that what a device does over time hits all of them. Every measurement is written when
it is made.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode import results as files
from benchmarks.spec_decode.flags import parse
from benchmarks.spec_decode.plan import (
    GIB,
    MIN_MODEL_LEN,
    Setup,
    acceptance_rates,
    engines_at_once,
    plan_groups,
    python_of,
    recording,
    shared_engines,
)
from benchmarks.spec_decode.process import ROOT, WorkerError, WorkerProcess
from benchmarks.spec_decode.results import EngineKey, PointKey
from benchmarks.spec_decode.rounds import expected_tokens_per_s, mean_length
from benchmarks.spec_decode.shapes import write_shapes
from benchmarks.spec_decode.traces import Trace, tokens_per_step

WARM_UP_TOKENS = 24
ANSWER_S = 180
# Of Llama-3.1-8B and the largest of its drafters, in bf16.
KV_BYTES_PER_TOKEN = 164 << 10


class Run:
    """One call of the benchmark: starts groups of engines and measures them."""

    def __init__(self, args: argparse.Namespace, setup: Setup, device: dict[str, Any]):
        self.args, self.setup = args, setup
        self.begin = time.monotonic()
        self.group_start_s = 0.0  # longest start of a group so far
        self.name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.logs = Path(tempfile.mkdtemp(prefix="spec_decode_logs_"))
        name = files.slug(args.gpu or device["name"])
        self.path = args.output or files.RESULTS / name / "engine.json"
        settings = {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()
        }
        del settings["site"], settings["output"]
        self.results: files.Results = {section: {} for section in files.SECTIONS}
        self.results["runs"][self.name] = {
            "command": files.command_line("engine"),
            "device": device,
            "settings": settings,
        }

    def is_over(self, needed_s: float = 0.0) -> bool:
        return time.monotonic() - self.begin + needed_s > self.args.time_limit

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def save(self) -> None:
        files.save(self.path, self.results)

    def fail(self, key: object, error: Exception) -> None:
        self.say(f"{key}: FAILED: {error}")
        self.results["failures"][str(key)] = {"error": str(error), "run": self.name}
        self.save()

    def run_group(self, keys: list[EngineKey]) -> None:
        begin = time.monotonic()
        self.say("starting " + ", ".join(map(str, keys)))
        shared = {key: [key] for key in keys}
        if self.args.share_engines:
            shared = shared_engines(keys)
        workers = {}
        for key, served in shared.items():
            lane = sum(started[:2] == key[:2] for started in workers)
            workers[key] = self.start(key, lane, served)
        for key, acceptance in product(keys, self.args.acceptance):
            name = recording(acceptance, key)
            if name is not None and not (key.is_auto or key.is_adaptive):
                recorded_length(name, key)  # takes seconds, while engines start
        try:
            ready = {k: w for k, w in workers.items() if self.await_ready(k, w)}
            took = time.monotonic() - begin
            self.group_start_s = max(self.group_start_s, took)
            self.say(f"{len(ready)} engines ready")
            by_key = {k: w for key, w in ready.items() for k in shared[key]}
            self.measure_all({key: by_key[key] for key in keys if key in by_key})
        finally:
            for worker in workers.values():
                worker.stop()

    def start(
        self, key: EngineKey, lane: int, served: list[EngineKey]
    ) -> WorkerProcess:
        python, env = self.setup.command(key, lane)
        log = self.logs / (str(key).replace("/", "_") + ".log")
        lengths = sorted({k.tree or k.num_tokens for k in served}, reverse=True)
        job = self.setup.job(key, lengths if len(served) > 1 else ())
        return WorkerProcess(python, env, job, log)

    def await_ready(self, key: EngineKey, worker: WorkerProcess) -> bool:
        try:
            found = worker.answer(self.args.start_timeout)
        except WorkerError as error:
            self.fail(key, error)
            return False
        self.results["engines"][str(key)] = {**found, "run": self.name}
        return True

    def measure_all(self, workers: dict[EngineKey, WorkerProcess]) -> None:
        """What matters most first: a run may end at any point."""
        for number, acceptance in enumerate(self.args.acceptance):
            for repeat in range(self.args.repeats):
                for context, concurrency in self.loads():
                    for key in list(workers):
                        if self.is_over():
                            return
                        point = PointKey(key, acceptance, concurrency, context)
                        self.measure(point, workers, repeat)
            if number == 0:
                self.profile_all(workers)

    def loads(self) -> Iterator[tuple[int, int]]:
        """Contexts and concurrencies whose tokens the KV cache holds."""
        room = self.args.kv_cache_gib * GIB / KV_BYTES_PER_TOKEN
        for context, concurrency in product(self.args.context, self.args.concurrency):
            if concurrency * (context + self.args.output_len) <= room:
                yield context, concurrency
            else:
                self.say(
                    f"{concurrency} requests of {context} tokens do not fit: raise "
                    "--kv-cache-gib"
                )

    def measure(
        self, point: PointKey, workers: dict[EngineKey, WorkerProcess], repeat: int
    ) -> None:
        key = point.engine
        rates = acceptance_rates(point.acceptance, key)
        if rates is None or key not in workers:
            return
        request = {
            "command": "measure",
            "concurrency": point.concurrency,
            "prompt_len": point.context,
            "acceptance_rates": rates,
            "recording": recording(point.acceptance, key),
            "number": repeat,
        }
        if self.args.share_engines and not key.is_auto:
            request["num_drafts"] = key.tree or key.num_tokens
        try:
            if repeat == 0:  # compiles and tunes what this batch size needs
                workers[key].ask(ANSWER_S, **request, output_len=WARM_UP_TOKENS)
            found = workers[key].ask(
                ANSWER_S, **request, output_len=self.args.output_len
            )
        except WorkerError as error:
            self.fail(point, error)
            workers.pop(key).stop()
            return
        self.record(point, rates, found)

    def record(
        self, point: PointKey, rates: list[float], found: dict[str, Any]
    ) -> None:
        key, length = point.engine, mean_length(rates)
        name = recording(point.acceptance, key)
        if name is None:
            found["expected_tokens_per_s"] = expected_tokens_per_s(
                point.concurrency, rates, found
            )
        elif key.is_auto or key.is_adaptive or not found["mean_step_s"]:
            length = found["tokens_per_step"]  # nothing else is known of its steps
        else:
            length = recorded_length(name, key)
            steps = point.concurrency / found["mean_step_s"]
            found["expected_tokens_per_s"] = steps * length
        entry = self.results["measurements"].setdefault(
            str(point),
            {"run": self.name, "acceptance_length": length, "repeats": []},
        )
        entry["repeats"].append(found)
        self.save()
        step = found["step_s"]
        self.say(
            f"{point}: {found['tokens_per_s']:.1f} tokens/s, step "
            + ("unknown" if step is None else f"{step * 1e3:.2f} ms")
            + (f", draft {found['draft_s'] * 1e3:.2f} ms" if found["draft_s"] else "")
        )

    def profile_all(self, workers: dict[EngineKey, WorkerProcess]) -> None:
        acceptance, context = self.args.acceptance[0], self.args.context[0]
        for concurrency in self.args.profile:
            for key in list(workers):
                if self.is_over():
                    return
                point = PointKey(key, acceptance, concurrency, context)
                rates = acceptance_rates(acceptance, key)
                if rates is not None:
                    self.profile(point, workers[key], rates)

    def profile(
        self, point: PointKey, worker: WorkerProcess, rates: list[float]
    ) -> None:
        request = {
            "command": "profile",
            "concurrency": point.concurrency,
            "prompt_len": point.context,
            "output_len": self.args.output_len,
            "acceptance_rates": rates,
            "recording": recording(point.acceptance, point.engine),
        }
        try:
            found = worker.ask(ANSWER_S, **request, num_steps=self.args.profile_steps)
        except WorkerError as error:
            self.fail(point, error)
            return
        self.results["profiles"][str(point)] = {**found, "run": self.name}
        self.save()
        self.say(f"{point}: profiled")


@cache
def recorded_length(name: str, key: EngineKey) -> float:
    """Tokens of a step over a whole recording, whatever part a round replays."""
    trace = Trace.load(name)
    if not key.tree:
        return tokens_per_step(trace, key.num_tokens)
    return tokens_per_step(trace, key.num_tokens, key.tree)


def probe_device(site: str, env: dict[str, str]) -> dict[str, Any]:
    python, env = python_of(site, env)
    command = [*python, "-m", "benchmarks.spec_decode.device"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The device could not be probed: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        device = probe_device(next(iter(args.site.values())), dict(os.environ))
        setup = Setup(
            sites=args.site,
            models=write_shapes(args.shapes, Path(folder)),
            device=args.device,
            max_num_seqs=args.max_num_seqs,
            kv_cache_gib=args.kv_cache_gib,
            max_model_len=max(MIN_MODEL_LEN, max(args.context) + args.output_len + 128),
            is_replayed=bool(args.trace),
            engine_args=args.engine_args,
        )
        run = Run(args, setup, device)
        at_once = args.engines_at_once
        if at_once is None:
            at_once = engines_at_once(device["memory_bytes"], args.kv_cache_gib)
        run.say(f"results: {run.path}, logs: {run.logs}")
        groups = plan_groups(
            args.implementations,
            args.modes,
            args.num_speculative_tokens,
            at_once,
            args.auto,
            args.shapes,
            args.draft_tree,
            args.adaptive,
        )
        for number, keys in enumerate(groups):
            if run.is_over(run.group_start_s):
                left = ", ".join(str(key) for group in groups[number:] for key in group)
                run.say(f"time limit reached, not measured: {left}")
                break
            run.run_group(keys)


if __name__ == "__main__":
    main()
