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
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from tools.overlay.base import ROOT, OverlayError, cache_folder

from .compare import Results, differences, file_of, read, read_accepted, report
from .hub import lay_hub
from .source import pins, unpack_release, unpack_source

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "upstream-tests"
HALVES = ("fast", "interpreted")


@dataclass
class Runner:
    """Runs upstream's test files in one half.

    `source` is the unpacked source distribution; a tree is a folder that holds `vllm`;
    `limit` is in seconds, for each file.
    """

    source: Path
    half: str
    limit: int
    jobs: int

    def differences(
        self, release: Path, ours: Path, files: list[str]
    ) -> dict[str, str]:
        """What passes on the release and not on ours, also when it is run again."""
        found = differences(
            self.run(release, files, kept_results(self.half)),
            self.run(ours, files, self.fresh("ours")),
        )
        again = sorted({file_of(test) for test in found})
        confirmed = differences(
            self.run(release, again, self.fresh("release-again")),
            self.run(ours, again, self.fresh("ours-again")),
        )
        return {test: why for test, why in confirmed.items() if test in found}

    def fresh(self, name: str) -> Path:
        results = BUILD / "results" / f"{self.half}-{name}.jsonl"
        results.unlink(missing_ok=True)
        return results

    def run(self, tree: Path, files: list[str], results: Path) -> Results:
        """The results of all, after a run of those files that have none yet."""
        results.parent.mkdir(parents=True, exist_ok=True)
        results.touch()
        done = read(results).ended
        if left := [file for file in files if file not in done]:
            print(f"{self.half}: {len(left)} files on {tree}", flush=True)
            command = [sys.executable, "-P", HERE / "worker.py", self.source, results]
            subprocess.run(
                [*map(str, command), str(self.limit), str(self.jobs)],
                input="\n".join(left),
                env=self.environment(tree),
                text=True,
                check=True,
            )
        return read(results)

    def environment(self, tree: Path) -> dict[str, str]:
        """One thread for each job, and nothing of a hub or of the user's caches."""
        path = [str(tree), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
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
    parts = [*pins(), sys.version, half, *map(version, packages)]
    parts += [(HERE / name).read_text() for name in ("worker.py", "hub.py")]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "upstream-tests" / f"{half}-{key}.jsonl"


def test_files(source: Path, named: list[str], leave_out: list[str]) -> list[str]:
    """The files among and below `named`, relative to `source`."""
    found = set()
    for path in (source / name for name in named):
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    files = sorted(str(path.relative_to(source)) for path in found)
    return [file for file in files if not file.startswith(tuple(leave_out))]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("upstream_tests", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args(argv)
    try:
        source, release = unpack_source(BUILD), unpack_release(BUILD)
    except OverlayError as error:
        parser.exit(1, f"{error}\n")
    lay_hub(BUILD / "hub" / "hub")
    ours = Path(find_spec("vllm").origin).parents[1]
    halves = tomllib.loads((HERE / "halves.toml").read_text())
    accepted = read_accepted(HERE / "accepted.toml")
    lines = []
    for half in [args.half] if args.half else HALVES:
        settings = halves[half]
        files = args.files or settings["files"]
        files = test_files(source, files, settings["leave_out"])
        runner = Runner(source, half, settings["limit"], args.jobs)
        found = runner.differences(release, ours, files)
        lines += report(found, accepted.get(half, {}), files)
    print("\n".join(lines))
    print(f"{len(lines)} differences that are not accepted")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
