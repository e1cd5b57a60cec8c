# SPDX-License-Identifier: Apache-2.0
"""Compares engines of this tree and of vLLM's release on one device; see README.md."""

import argparse
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.plan import (
    GIB,
    is_shared,
    llm_args,
    python_for,
    shared_depth,
)
from benchmarks.spec_decode.results import (
    MAIN_CONTEXT,
    OURS,
    ROOT,
    EngineKey,
    PointKey,
)
from benchmarks.spec_decode.side_by_side import SideBySide, check, make_parser
from benchmarks.spec_decode.traces import (
    EQUAL,
    RECORDED,
    expected_length,
    recording,
)
from vllm.benchmarks.drafters.processes import EngineProcess

WORKER = "benchmarks.spec_decode.worker", "serve"
WARM_UP_TOKENS = 24
ANSWER_S = 180
# For Llama-3.1-8B and the largest of its drafters, in bf16.
KV_BYTES_PER_TOKEN = 164 << 10
Engines = dict[EngineKey, EngineProcess]


class EngineBenchmark(SideBySide):
    """Rounds of requests that arrive together, on in-process LLM engines."""

    def start(self, key: EngineKey, lane: int) -> EngineProcess:
        is_replayed = bool(self.args.trace) and key.mode != "none"
        job = {"engine": llm_args(key, self.args), "is_replayed": is_replayed}
        python, env = python_for(key, self.args, lane)
        process = EngineProcess(python, WORKER, job, env, self.log(key), cwd=ROOT)
        process.send(("describe", {}))
        return process

    def await_ready(self, engine: EngineProcess, timeout_s: float) -> dict[str, Any]:
        return engine.answer(timeout_s)

    def measure_all(self, engines: Engines) -> None:
        choosing = [
            engine
            for key, engine in engines.items()
            if key.implementation == OURS and (key.is_auto or key.is_adaptive)
        ]
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

    def round(self, point: PointKey) -> dict[str, Any]:
        """The arguments of a worker's round."""
        key = point.engine
        num_drafts = None if key.is_auto else key.tree or key.num_tokens
        return {
            "concurrency": point.concurrency,
            "prompt_len": point.context,
            "output_len": self.args.output_len,
            "recording": recording(point.acceptance, key),
            "shared": (num_drafts, key.is_adaptive)
            if is_shared(key, self.args)
            else None,
        }

    def measure(self, point: PointKey, engines: Engines, repeat: int) -> None:
        engine = engines[point.engine]
        setup = self.round(point) | {"number": repeat}
        try:
            if repeat == 0:  # compiles and autotunes for this batch size
                short = setup | {"output_len": WARM_UP_TOKENS}
                engine.ask("measure", ANSWER_S, **short)
            self.record(point, engine.ask("measure", ANSWER_S, **setup))
        except RuntimeError as error:
            self.run.fail(point, error)
            engine.stop()
            for key in [key for key in engines if engines[key] is engine]:
                del engines[key]

    def record(self, point: PointKey, found: dict[str, Any]) -> None:
        key = point.engine
        if is_shared(key, self.args):  # depths of its trees are those of its engine
            key = key._replace(is_auto=True, num_tokens=shared_depth(self.args))
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
