# SPDX-License-Identifier: Apache-2.0
"""Code shared by the engine and the serving benchmark: flags, and groups of engines.

Several engines are loaded at once and measured strictly one at a time, in turns, so
that changes of the device over time affect all of them equally.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.spec_decode.models import MODES, SETS, modes_of, write_models
from benchmarks.spec_decode.plan import (
    ENGINE_GIB,
    GIB,
    MIN_MODEL_LEN,
    engine_of,
    plan_groups,
    python_of,
)
from benchmarks.spec_decode.results import (
    IMPLEMENTATIONS,
    OURS,
    ROOT,
    EngineKey,
    Run,
)
from benchmarks.spec_decode.traces import RECORDED, TEXTS, expected_length
from vllm.benchmarks.drafters.processes import last_error

START_S = 400  # an engine takes longer only if something hangs
PROBE = """
import json, torch, vllm
found = {"torch": torch.__version__, "vllm": vllm.__version__}
if torch.cuda.is_available():
    gpu = torch.cuda.get_device_properties(0)
    found |= {"name": gpu.name, "memory_bytes": gpu.total_memory}
else:
    found |= {"name": "cpu", "memory_bytes": 0}
print(json.dumps(found))
"""


def probe_device(python: list[str], env: dict[str, str]) -> dict[str, Any]:
    """Name and memory of the GPU, "cpu" without one, and the software's versions; in
    another process, so that this one does not use the device."""
    command = [*python, "-c", PROBE]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The device could not be probed: {last_error(done.stderr)}")
    return json.loads(done.stdout.splitlines()[-1])


def make_parser(benchmark: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.spec_decode.{benchmark}",
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--site", action="append", required=True, metavar="NAME=PATH",
        help="where ours and base are: a folder of packages for PYTHONPATH, or a "
        "Python interpreter; give it for each name")  # fmt: skip
    add("--implementations", nargs="+", choices=IMPLEMENTATIONS,
        default=list(IMPLEMENTATIONS))  # fmt: skip
    add("--modes", nargs="+", choices=list(MODES), help="all that the shapes have")
    add("--num-speculative-tokens", type=int, nargs="*", default=[3, 5, 7, 11],
        metavar="K", help="of engines that draft as many in every step; none are "
        "measured if no number is given")  # fmt: skip
    add("--auto", type=int, metavar="K", help="also an engine of ours that chooses "
        "how much to draft, up to K; needs --trace")  # fmt: skip
    add("--trace", nargs="+", choices=TEXTS, default=[], help="replay what the bundled "
        "drafters had accepted of greedy or sampled text")  # fmt: skip
    add("--draft-tree", type=int, nargs="+", default=[], metavar="N",
        help="also engines of ours with draft trees of so many nodes, and with 0 "
        "--auto without trees, too; needs --trace")  # fmt: skip
    add("--adaptive", action="store_true", help="also engines with "
        "enable_adaptive_verification and the largest K, ours and Runner V2's; needs "
        "--trace, whose confidence it reads")  # fmt: skip
    add("--shapes", choices=SETS, default=SETS[0], help="of the target and drafters")
    add("--max-num-seqs", type=int, default=64)
    add("--kv-cache-gib", type=float, default=5.0, help="KV cache of each engine")
    add("--engines-at-once", type=int, help="engines loaded together; what fits")
    add("--engine-args", type=json.loads, default={},
        help="more arguments of LLM, as JSON")  # fmt: skip
    add("--spec-args", type=json.loads, default={},
        help="more keys of the speculative config of ours, as JSON")  # fmt: skip
    add("--time-limit", type=float, default=570.0, help="seconds, then stop cleanly")
    add("--output", type=Path, help="results file; in results/<gpu>/ by default")
    parser.set_defaults(share_engines=False, context=[0], output_len=0)
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses inconsistent flags; fills in defaults that depend on other flags."""
    args.site = dict(site.partition("=")[::2] for site in args.site)
    for name, path in args.site.items():
        if name not in (OURS, "base") or not Path(path).exists():
            parser.error(f"--site {name}={path}: give ours=PATH or base=PATH")
    for name in args.implementations:
        if (site := OURS if name == OURS else "base") not in args.site:
            parser.error(f"{name} needs --site {site}=PATH")
    if (args.auto or args.draft_tree or args.adaptive) and not args.trace:
        parser.error(
            "--auto, --draft-tree and --adaptive need --trace: what they go by is "
            "recorded"
        )
    known = modes_of(args.shapes)
    args.modes = args.modes or known
    if missing := set(args.modes) - set(known):
        parser.error(f"the shapes {args.shapes} have no {', '.join(sorted(missing))}")


class SideBySide:
    """Starts groups of engines and measures them.

    Subclasses have `start(key, lane)`, which does not wait, `await_ready(engine,
    timeout_s)`, which returns a description of it or raises RuntimeError, and
    `measure_all(engines)`, which measures the most important points first. An engine
    has `stop()`, which waits until its memory is free.

    Args:
        benchmark: name of the benchmark's module.
        folder: where the models are written.
    """

    def __init__(self, benchmark: str, args: argparse.Namespace, folder: Path):
        self.args = args
        device = probe_device(*python_of(next(iter(args.site.values()))))
        longest = max(args.context) + args.output_len + 128
        args.models = write_models(args.shapes, folder)
        args.on_cpu = device["name"] == "cpu"
        args.max_model_len = max(MIN_MODEL_LEN, longest)
        self.run = Run(benchmark, device, args.output, args.time_limit)
        self.logs = Path(tempfile.mkdtemp(prefix="spec_decode_logs_"))
        self.run.say(f"logs: {self.logs}")
        fit = device["memory_bytes"] / GIB // (ENGINE_GIB + args.kv_cache_gib)
        self.at_once = args.engines_at_once or max(1, int(fit))

    def log(self, key: EngineKey) -> Path:
        return self.logs / (str(key).replace("/", "_") + ".log")

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
        started: dict[EngineKey, Any] = {}
        try:
            for engine in dict.fromkeys(engines.values()):
                lane = sum(other[:2] == engine[:2] for other in started)
                started[engine] = self.start(engine, lane)
            for text, key in product(self.args.trace, keys):
                expected_length(RECORDED + text, key, {})  # slow, so do it now
            ready = {k: e for k, e in started.items() if self.is_ready(k, e)}
            took = time.monotonic() - begin
            self.measure_all({k: ready[e] for k, e in engines.items() if e in ready})
        finally:
            for engine in started.values():
                engine.stop()
        return took

    def is_ready(self, key: EngineKey, engine: Any) -> bool:
        try:
            found = self.await_ready(engine, START_S)
        except RuntimeError as error:
            self.run.fail(key, error)
            return False
        self.run.record("engines", key, found)
        self.run.say(f"{key} is up")
        return True
