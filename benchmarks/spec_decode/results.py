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
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "results"
OURS, BASE_V2, BASE_V1 = "ours", "base-v2", "base-v1"
IMPLEMENTATIONS = (OURS, BASE_V2, BASE_V1)
# What keys do not name.
MAIN_SHAPES = "llama-3.1-8b"
MAIN_CONTEXT = 128
SETTING = re.compile(r"K(\d+)(?:tree(\d+))?(auto)?(adaptive)?")
SECTIONS = ("runs", "engines", "measurements", "profiles", "failures")
FILE_FLAGS = ("--output",)
SITE_FLAG, SITES = "--site", "$SITES"  # as README.md writes where the installs are
Results = dict[str, dict[str, Any]]


class EngineKey(NamedTuple):
    """One engine of the matrix.

    Attributes:
        num_tokens: K, 0 without speculation.
        tree: nodes of a draft tree of depth K; 0: a chain.
        is_adaptive: adaptive verification trims drafts, up to K.
        is_auto: K is the most that a step may draft, and every step chooses its own.
        shapes: name of the set of models.
    """

    implementation: str
    mode: str
    num_tokens: int
    is_auto: bool = False
    shapes: str = MAIN_SHAPES
    tree: int = 0
    is_adaptive: bool = False

    @property
    def setting(self) -> str:
        """K, and what else an engine drafts by: "K7", "K7tree31", "K11auto"."""
        tree = f"tree{self.tree}" if self.tree else ""
        auto = "auto" if self.is_auto else ""
        return f"K{self.num_tokens}{tree}{auto}{'adaptive' if self.is_adaptive else ''}"

    def __str__(self) -> str:
        where = "" if self.shapes == MAIN_SHAPES else f"@{self.shapes}"
        return f"{self.implementation}/{self.mode}{where}/{self.setting}"

    @classmethod
    def parse(cls, text: str) -> "EngineKey":
        implementation, what, tokens = text.split("/")
        mode, _, shapes = what.partition("@")
        number, tree, auto, adaptive = SETTING.fullmatch(tokens).groups()
        return cls(
            implementation,
            mode,
            int(number),
            bool(auto),
            shapes or MAIN_SHAPES,
            int(tree or 0),
            bool(adaptive),
        )


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
