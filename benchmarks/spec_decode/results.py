# SPDX-License-Identifier: Apache-2.0
"""Results files: merged by key, and what follows from their numbers.

A file holds `runs` (what was run, by its start), and `measurements`, `profiles`,
`engines` and `failures`, by the key of what they are about.
"""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results"
OURS, BASE_V2, BASE_V1 = "ours", "base-v2", "base-v1"
IMPLEMENTATIONS = (OURS, BASE_V2, BASE_V1)
# What keys do not name.
MAIN_SHAPES = "llama-3.1-8b"
MAIN_CONTEXT = 128
SECTIONS = ("runs", "engines", "measurements", "profiles", "failures")
FILE_FLAGS = ("--output", "--prompts")
SITE_FLAG, SITES = "--site", "$SITES"  # as README.md writes where the installs are
Results = dict[str, dict[str, Any]]


class EngineKey(NamedTuple):
    """One engine of the matrix.

    Attributes:
        num_tokens: K, 0 without speculation.
        tree: nodes of a draft tree of depth K; 0: a chain.
        is_auto: K is the most that a step may draft, and every step chooses its own.
        shapes: name of the set of models.
    """

    implementation: str
    mode: str
    num_tokens: int
    is_auto: bool = False
    shapes: str = MAIN_SHAPES
    tree: int = 0

    def __str__(self) -> str:
        auto = "auto" if self.is_auto else ""
        tree = f"tree{self.tree}" if self.tree else ""
        where = "" if self.shapes == MAIN_SHAPES else f"@{self.shapes}"
        what = f"K{self.num_tokens}{tree}{auto}"
        return f"{self.implementation}/{self.mode}{where}/{what}"

    @classmethod
    def parse(cls, text: str) -> "EngineKey":
        implementation, what, tokens = text.split("/")
        mode, _, shapes = what.partition("@")
        number, is_auto = tokens[1:].removesuffix("auto"), tokens.endswith("auto")
        depth, _, tree = number.partition("tree")
        shapes = shapes or MAIN_SHAPES
        return cls(implementation, mode, int(depth), is_auto, shapes, int(tree or 0))


class PointKey(NamedTuple):
    """One measured point.

    Attributes:
        acceptance: says what length was drawn, or which recording was replayed.
        context: tokens of a prompt.
    """

    engine: EngineKey
    acceptance: str
    concurrency: int
    context: int = MAIN_CONTEXT

    def __str__(self) -> str:
        context = "" if self.context == MAIN_CONTEXT else f"@{self.context}"
        return f"{self.engine}/{self.acceptance}/c{self.concurrency}{context}"

    @classmethod
    def parse(cls, text: str) -> "PointKey":
        engine, acceptance, load = text.rsplit("/", 2)
        concurrency, _, context = load[1:].partition("@")
        context = int(context or MAIN_CONTEXT)
        return cls(EngineKey.parse(engine), acceptance, int(concurrency), context)


def command_line(module: str) -> str:
    """How this program was called, but for where files are."""
    given = arguments = sys.argv[1:]
    for flag in (*FILE_FLAGS, SITE_FLAG):
        arguments = [a for a in arguments if not a.startswith(f"{flag}=")]
        while flag in arguments:
            at = arguments.index(flag)
            del arguments[at : at + 2]
    has_sites = any(a.partition("=")[0] == SITE_FLAG for a in given)
    program = f"python -m benchmarks.spec_decode.{module}"
    return " ".join([program, *[SITES] * has_sites, *map(shlex.quote, arguments)])


def slug(device_name: str) -> str:
    """A folder's name for a device: nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def merge(old: Results, new: Results) -> Results:
    """`new` over `old`, key by key.

    A point that succeeds forgets its failure; an older run of which nothing is left is
    forgotten.
    """
    merged = {s: {**old.get(s, {}), **new.get(s, {})} for s in SECTIONS}
    done = new.get("engines", {}).keys() | new.get("measurements", {}).keys()
    for key in done - new.get("failures", {}).keys():
        merged["failures"].pop(key, None)
    runs = {e.get("run") for s in SECTIONS[1:] for e in merged[s].values()}
    latest = new.get("runs", {}).keys()
    merged["runs"] = {k: r for k, r in merged["runs"].items() if k in runs | latest}
    return merged


def of_run(
    begin: str, run: dict[str, Any], section: str, rows: dict[str, dict[str, Any]]
) -> Results:
    """What one run found, each row with its name.

    Args:
        begin: its start, which names it.
        run: its command, device and settings.
    """
    named = {key: {**row, "run": begin} for key, row in rows.items()}
    return {"runs": {begin: run}, section: named}


def load(path: Path) -> Results:
    return json.loads(path.read_text()) if path.is_file() else {}


def save(path: Path, results: Results) -> None:
    """Merges into a file, which is whole at any moment; a list's numbers on a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(merge(load(path), results), indent=1, sort_keys=True)
    numbers = re.compile(r"\[\s+([\d\s.,e-]+?)\s+\]")
    text = numbers.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, path)


class Spread(NamedTuple):
    """A median, and half the distance from least to most as a share of it."""

    median: float
    spread: float
    count: int


def spread(values: list[float | None]) -> Spread | None:
    """None where nothing was measured."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    middle = median(known)
    half = (max(known) - min(known)) / 2
    return Spread(middle, half / middle if middle else 0.0, len(known))


def column(point: dict[str, Any], name: str) -> Spread | None:
    return spread([repeat.get(name) for repeat in point["repeats"]])


def num_passes(mode: str, num_tokens: int, parallel: tuple[str, ...]) -> int:
    """Draft passes of a step."""
    return 1 if mode in parallel and num_tokens else num_tokens


def floor_step_s(
    target_bytes: int, draft_bytes: int, passes: int, bytes_per_s: float
) -> float:
    """Seconds of a step that only reads every weight once per pass.

    Args:
        bytes_per_s: what a copy reads and writes per second, together.
    """
    return (target_bytes + passes * draft_bytes) / bytes_per_s


def floor_share(
    results: Results, key: PointKey, parallel: tuple[str, ...]
) -> float | None:
    """Which share of a step the memory floor is: 1 is as fast as memory allows."""
    engine = results.get("engines", {}).get(str(key.engine))
    point = results["measurements"].get(str(key))
    step = point and column(point, "step_s")
    if not engine or not step or engine["target_bytes"] is None:
        return None
    run = results["runs"][point["run"]]
    passes = num_passes(key.engine.mode, key.engine.num_tokens, parallel)
    floor = floor_step_s(
        engine["target_bytes"],
        engine["draft_bytes"],
        passes,
        run["device"]["copy_bytes_per_s"],
    )
    return floor / step.median


def draft_floor_s(
    results: Results, key: PointKey, parallel: tuple[str, ...]
) -> float | None:
    """Seconds of a step's draft passes if they only read every weight once per pass."""
    engine = results.get("engines", {}).get(str(key.engine))
    if not engine or engine.get("draft_bytes") is None:
        return None
    run = results["runs"][results["measurements"][str(key)]["run"]]
    passes = num_passes(key.engine.mode, key.engine.num_tokens, parallel)
    bytes_per_s = run["device"]["copy_bytes_per_s"]
    return floor_step_s(0, engine["draft_bytes"], passes, bytes_per_s)
