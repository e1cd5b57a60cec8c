# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.upstream_tests [--half HALF] [FILE...]`: upstream's own tests, run
on the pinned release and on the installed tree. Prints what passes there and not here;
exits with 1 unless `accepted.toml` accepts it.

Halves: `fast` without Triton, `interpreted` under Triton's interpreter; both where none
is given. FILE is one of upstream's test files or folders instead of those of
`halves.toml`. The release is run once: its results are kept in the cache.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tools.overlay.base import (
    ROOT,
    OverlayError,
    cache_folder,
    pinned_base,
    target_device,
)

from .compare import differences, file_of, read, report
from .source import source_pin, unpack_release, unpack_source

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "upstream-tests"
HALVES = ("fast", "interpreted")


@dataclass
class Runner:
    """Runs upstream's test files in one half, each for at most `limit` seconds.

    `source` is the unpacked source distribution; a tree is a folder that holds `vllm`.
    """

    source: Path
    half: str
    limit: int
    jobs: int

    def differences(
        self, release: Path, ours: Path, files: list[str]
    ) -> dict[str, str]:
        """What passes on the release and not on ours, also when it is run again."""
        there = self.run(release, files, kept_results(self.half))
        found = differences(there, self.run(ours, files, self.fresh("ours")), files)
        again = sorted(set(map(file_of, found)))
        there = self.run(release, again, self.fresh("release-again"))
        sure = differences(
            there, self.run(ours, again, self.fresh("ours-again")), again
        )
        return {test: why for test, why in sure.items() if test in found}

    def fresh(self, name: str) -> Path:
        results = BUILD / "results" / f"{self.half}-{name}.jsonl"
        results.unlink(missing_ok=True)
        return results

    def run(self, tree: Path, files: list[str], results: Path) -> Path:
        """`results`, with those of all files: runs the ones that have none there."""
        results.parent.mkdir(parents=True, exist_ok=True)
        results.touch()
        _, done = read(results)
        if left := [file for file in files if file not in done]:
            print(f"{self.half}: {len(left)} files on {tree}", flush=True)
            command = [sys.executable, "-P", HERE / "worker.py", self.source, results]
            command += [self.limit, self.jobs, *left]
            environment = self.environment(tree)
            if subprocess.run([*map(str, command)], env=environment).returncode:
                raise OverlayError(f"No test of {tree} could be run; see above.")
        return results

    def environment(self, tree: Path) -> dict[str, str]:
        """One thread for each job, and nothing of a hub or of the user's caches."""
        path = [str(tree), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TRITON_INTERPRET": str(int(self.half == "interpreted")),
            "HF_HOME": str(BUILD / "hub"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CACHE_ROOT": str(BUILD / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }


def kept_results(half: str) -> Path:
    """Where the release's results stay, for all that they depend on."""
    packages = ("torch", "triton", "transformers", "pytest")
    base = pinned_base(target_device())
    parts = [source_pin().sha256, base.sha256, sys.version, *map(version, packages)]
    parts += [(HERE / name).read_text() for name in ("worker.py", "hub.toml")]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "upstream-tests" / f"{half}-{key}.jsonl"


def test_files(source: Path, named: list[str], leave_out: list[str]) -> list[str]:
    """The test files among and below `named`, patterns relative to `source`."""
    found = set()
    for path in (path for name in named for path in source.glob(name)):
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    files = sorted(str(path.relative_to(source)) for path in found)
    return [file for file in files if file not in leave_out]


def lay_hub(hub: Path) -> None:
    """Puts the models of hub.toml where transformers looks for what it has fetched."""
    models = tomllib.loads((HERE / "hub.toml").read_text())
    shutil.rmtree(hub, ignore_errors=True)
    for name, own in models.items():
        config = models.get(own.pop("like", None), {}) | own
        models[name] = config  # for others that are like it
        model = hub / f"models--{name.replace('/', '--')}"
        (files := model / "snapshots" / "0").mkdir(parents=True)
        (files / "config.json").write_text(json.dumps(config))
        for tokenizer in (ROOT / "models" / "target").glob("tokenizer*"):
            (files / tokenizer.name).symlink_to(tokenizer)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0")


def compare(named: list[str], wanted: Iterable[str], jobs: int) -> list[str]:
    """What `report` says of the `wanted` halves.

    Args:
        named: files and folders instead of those of halves.toml, if any.

    Raises:
        OverlayError: the source or the release cannot be had, or no test can be run.
    """
    source, release = unpack_source(BUILD), unpack_release(BUILD)
    lay_hub(BUILD / "hub" / "hub")
    ours = Path(find_spec("vllm").origin).parents[1]
    halves = tomllib.loads((HERE / "halves.toml").read_text())
    accepted = tomllib.loads((HERE / "accepted.toml").read_text())
    lines = []
    for half in wanted:
        settings = halves[half]
        files = test_files(source, named or settings["files"], settings["leave_out"])
        runner = Runner(source, half, settings["limit"], jobs)
        found = runner.differences(release, ours, files)
        lines += report(found, accepted.get(half, {}), files)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("upstream_tests", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    try:
        lines = compare(args.files, [args.half] if args.half else HALVES, args.jobs)
    except OverlayError as error:
        parser.exit(2, f"{error}\n")
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
