# SPDX-License-Identifier: Apache-2.0
"""Compares engines of this tree and of vLLM's release on one device; see README.md.

Several engines are loaded at once and measured strictly one at a time, in turns, so
that changes of the device over time affect all of them equally.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import vllm
from benchmarks.spec_decode.flags import parse
from benchmarks.spec_decode.models import write_models
from benchmarks.spec_decode.plan import (
    ENGINE_GIB,
    GIB,
    MIN_MODEL_LEN,
    engine_of,
    llm_args,
    plan_groups,
    python_for,
)
from benchmarks.spec_decode.results import OURS, ROOT, EngineKey, PointKey, Run
from benchmarks.spec_decode.traces import RECORDED, expected_length, recording
from vllm.benchmarks.drafters.processes import EngineProcess
from vllm.platforms import current_platform

WORKER = "benchmarks.spec_decode.worker", "serve"
WARM_UP_TOKENS = 24
START_S, ANSWER_S = 400, 180  # an engine takes longer only if something hangs
# For Llama-3.1-8B and the largest of its drafters, in bf16.
KV_BYTES_PER_TOKEN = 164 << 10
Engines = dict[EngineKey, EngineProcess]


class EngineBenchmark:
    """Rounds of requests that arrive together, on groups of in-process LLM engines.

    Args:
        folder: where the models are written.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args = args
        device = {
            "name": current_platform.get_device_name(),
            "memory_bytes": current_platform.get_device_total_memory(),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        }
        longest = max(args.context) + args.output_len + 128
        args.models = write_models(args.shapes, folder)
        args.on_cpu = current_platform.is_cpu()
        args.max_model_len = max(MIN_MODEL_LEN, longest)
        self.run = Run("engine", device, args.output, args.time_limit)
        self.logs = Path(tempfile.mkdtemp(prefix="spec_decode_logs_"))
        self.run.say(f"logs: {self.logs}")
        fit = device["memory_bytes"] / GIB // (ENGINE_GIB + args.kv_cache_gib)
        self.at_once = args.engines_at_once or max(1, int(fit))

    def measure_groups(self) -> None:
        # So that `timeout` ends the engines too: each has a session of its own.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
        groups, longest_s = plan_groups(self.args, self.at_once), 0.0
        for number, keys in enumerate(groups):
            if self.run.is_over(longest_s):
                left = ", ".join(str(key) for group in groups[number:] for key in group)
                self.run.say(f"time limit reached, not measured: {left}")
                break
            longest_s = max(longest_s, self.measure_group(keys))

    def measure_group(self, keys: list[EngineKey]) -> float:
        """Measures engines that are loaded together; returns seconds to start them."""
        begin = time.monotonic()
        self.run.say("starting " + ", ".join(map(str, keys)))
        engines = {key: engine_of(key, self.args) for key in keys}
        started: Engines = {}
        try:
            for engine in dict.fromkeys(engines.values()):
                lane = sum(other[:2] == engine[:2] for other in started)
                started[engine] = self.start(engine, lane)
            for text, key in product(self.args.trace, keys):
                expected_length(RECORDED + text, key, {})  # slow, so do it now
            failed = {key for key in started if not self.is_ready(key, started[key])}
            took = time.monotonic() - begin
            up = {key: started[e] for key, e in engines.items() if e not in failed}
            self.measure_all(up)
        finally:
            for engine in started.values():
                engine.stop()
        return took

    def start(self, key: EngineKey, lane: int) -> EngineProcess:
        is_replayed = bool(self.args.trace) and key.mode != "none"
        job = {"engine": llm_args(key, self.args), "is_replayed": is_replayed}
        python, env = python_for(key, self.args, lane)
        log = self.logs / (str(key).replace("/", "_") + ".log")
        process = EngineProcess(python, WORKER, job, env, log, cwd=ROOT)
        process.send(("describe", {}))
        return process

    def is_ready(self, key: EngineKey, engine: EngineProcess) -> bool:
        try:
            found = engine.answer(START_S)
        except RuntimeError as error:
            self.run.fail(key, error)
            return False
        self.run.record("engines", key, found)
        self.run.say(f"{key} is up")
        return True

    def measure_all(self, engines: Engines) -> None:
        ours = [key for key in engines if key.implementation == OURS]
        choosing = (engines[key] for key in ours if key.is_auto)
        for engine in dict.fromkeys(choosing):  # several keys may share one
            engine.ask("time_steps", ANSWER_S)
        for acceptance in self.args.acceptance:
            rounds = product(range(self.args.repeats), self.loads(), list(engines))
            for repeat, (context, concurrency), key in rounds:
                if self.run.is_over():
                    return
                if key in engines:
                    point = PointKey(key, acceptance, concurrency, context)
                    self.measure(point, engines, repeat)

    def loads(self) -> Iterator[tuple[int, int]]:
        """Contexts and concurrencies whose tokens fit into the KV cache."""
        room = self.args.kv_cache_gib * GIB / KV_BYTES_PER_TOKEN
        for context, concurrency in product(self.args.context, self.args.concurrency):
            if concurrency * (context + self.args.output_len) <= room:
                yield context, concurrency
            else:
                what = f"{concurrency} requests of {context} tokens"
                self.run.say(f"{what} do not fit: raise --kv-cache-gib")

    def measure(self, point: PointKey, engines: Engines, repeat: int) -> None:
        key, engine = point.engine, engines[point.engine]
        setup = {
            "number": repeat,
            "concurrency": point.concurrency,
            "prompt_len": point.context,
            "recording": recording(point.acceptance, key),
            "num_drafts": None if key.is_auto else key.tree or key.num_tokens,
        }

        def ask(output_len: int) -> dict[str, Any]:
            return engine.ask("measure", ANSWER_S, output_len=output_len, **setup)

        try:
            if repeat == 0:  # compiles and autotunes for this batch size
                ask(WARM_UP_TOKENS)
            self.record(point, ask(self.args.output_len))
        except RuntimeError as error:
            self.run.fail(point, error)
            engine.stop()
            for key in [key for key in engines if engines[key] is engine]:
                del engines[key]

    def record(self, point: PointKey, found: dict[str, Any]) -> None:
        # Depths of trees are those of the engine.
        key = engine_of(point.engine, self.args)
        length = expected_length(point.acceptance, key, found["drafted"])
        if length and found["mean_step_s"]:
            steps_per_s = point.concurrency / found["mean_step_s"]
            found["expected_tokens_per_s"] = steps_per_s * length
        before = self.run.results.get("measurements", {}).get(str(point), {})
        repeats = [*before.get("repeats", []), found]
        self.run.record("measurements", point, {"repeats": repeats})
        times = {name: found[name] for name in ("step_s", "draft_s") if found[name]}
        shown = [f"{name[:-2]} {s * 1e3:.2f} ms" for name, s in times.items()]
        tokens = f"{found['tokens_per_s']:.1f} tokens/s"
        self.run.say(f"{point}: " + ", ".join([tokens, *shown]))


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        EngineBenchmark(args, Path(folder)).measure_groups()


if __name__ == "__main__":
    main()
