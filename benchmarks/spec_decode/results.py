# SPDX-License-Identifier: Apache-2.0
"""Results files, which are merged by key, the keys, and runs that write them.

A file holds `runs` (commands, by start time), and `measurements` and `engines` by the
key of the point or engine.
"""

import datetime
import json
import os
import re
import shlex
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.spec_decode.models import MAIN, ROOT

RESULTS = ROOT / "benchmarks/results"
OURS, BASE_V2, BASE_V1 = "ours", "base-v2", "base-v1"
IMPLEMENTATIONS = (OURS, BASE_V2, BASE_V1)
MAIN_CONTEXT = 128  # keys name neither this nor MAIN
KEY = re.compile(  # of a point
    r"(?P<runner>[^/]+)/(?P<mode>[^/@]+)(?:@(?P<shapes>[^/]+))?/(?P<setting>K[^/]+)/"
    r"(?P<acceptance>[^/]+)/c(?P<requests>\d+)(?:@(?P<context>\d+))?"
)
PLACES = ("--output", "--site")  # flags that say where files are
SECTIONS = ("runs", "engines", "measurements")
Results = dict[str, dict[str, Any]]


class EngineKey(NamedTuple):
    """One engine of the matrix.

    Attributes:
        num_tokens: K, 0 without speculation.
        tree: nodes of a draft tree of depth K; 0: a chain.
        is_auto: every step chooses its draft length, and K is the maximum.
        shapes: name of the set of models.
    """

    implementation: str
    mode: str
    num_tokens: int
    is_auto: bool = False
    shapes: str = MAIN
    tree: int = 0

    def __str__(self) -> str:
        where = "" if self.shapes == MAIN else f"@{self.shapes}"
        tree = f"tree{self.tree}" if self.tree else ""
        setting = f"K{self.num_tokens}{tree}{'auto' * self.is_auto}"
        return f"{self.implementation}/{self.mode}{where}/{setting}"


class PointKey(NamedTuple):
    """One measured point.

    Attributes:
        acceptance: names the synthetic acceptance or the recording that was replayed.
        context: tokens of a prompt.
    """

    engine: EngineKey
    acceptance: str
    concurrency: int
    context: int = MAIN_CONTEXT

    def __str__(self) -> str:
        context = "" if self.context == MAIN_CONTEXT else f"@{self.context}"
        return f"{self.engine}/{self.acceptance}/c{self.concurrency}{context}"


def merge(old: Results, new: Results) -> Results:
    """`new` over `old`, key by key; old runs without any entry left are dropped."""
    merged = {s: {**old.get(s, {}), **new.get(s, {})} for s in SECTIONS}
    runs = {e.get("run") for s in SECTIONS[1:] for e in merged[s].values()}
    latest = new.get("runs", {}).keys()
    merged["runs"] = {k: r for k, r in merged["runs"].items() if k in runs | latest}
    return merged


def load(path: Path) -> Results:
    return json.loads(path.read_text()) if path.is_file() else {}


def save(path: Path, results: Results) -> None:
    """Merges into a file and replaces it atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merge(load(path), results), indent=1, sort_keys=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, path)


def command_line(benchmark: str) -> str:
    """The command without paths; $SITES stands for the sites, as in README.md."""
    words, given = ["python -m benchmarks.spec_decode." + benchmark], sys.argv[1:]
    if any(word.startswith("--site") for word in given):
        words.append("$SITES")
    for before, word in pairwise(["", *given]):
        if before not in PLACES and word.partition("=")[0] not in PLACES:
            words.append(shlex.quote(word))
    return " ".join(words)


class Run:
    """The results of one run, saved as they are found.

    Args:
        benchmark: its module, and the default name of the results file.
        output: another results file.
        time_limit: seconds after which `is_over` is true.
    """

    def __init__(
        self,
        benchmark: str,
        device: dict[str, Any],
        output: Path | None = None,
        time_limit: float = float("inf"),
    ):
        self.begin, self.time_limit = time.monotonic(), time_limit
        self.name = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        folder = re.sub(r"[^a-z0-9]+", "-", device["name"].lower()).strip("-")
        self.path = output or RESULTS / folder / f"{benchmark}.json"
        run = {"command": command_line(benchmark), "device": device}
        self.results: Results = {"runs": {self.name: run}}
        self.say(f"results: {self.path}")

    def is_over(self, needed_s: float = 0.0) -> bool:
        return time.monotonic() - self.begin + needed_s > self.time_limit

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    def record(self, section: str, key: object, found: dict[str, Any]) -> None:
        rows = self.results.setdefault(section, {})
        rows[str(key)] = {**found, "run": self.name}
        save(self.path, self.results)

    def fail(self, key: object, error: Exception) -> None:
        self.say(f"{key}: FAILED: {error}")
