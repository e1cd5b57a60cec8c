# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.upstream_tests [--half HALF] [FILE...]`: runs upstream's own tests
on the pinned release and on the installed tree. Prints what passes there and not here;
exits with 1 unless `accepted.toml` accepts it.

Halves: `fast` runs as users do, `interpreted` under Triton's interpreter; without
--half both run. FILE is a test file or folder of upstream, instead of those of
`halves.toml`. The release is run once: its results are kept in the cache, to be deleted
after a change of `hub.toml`; what differs from them is run again on both sides.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from tools.overlay.base import ROOT, OverlayError, cache_folder, run_command

from .compare import Outcomes, differences, file_of, read, report
from .source import unpack_release, unpack_source

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "upstream-tests"
HALVES = tomllib.loads((HERE / "halves.toml").read_text())


def compare(half: str, named: list[str], jobs: int) -> list[str]:
    """The report of a half; its last line, with counts, is printed.

    Args:
        named: files and folders instead of those of halves.toml, if any.

    Raises:
        OverlayError: the source or the release is not available, or no test can run.
    """
    source, release = unpack_source(BUILD), unpack_release(BUILD)
    ours = Path(find_spec("vllm").origin).parents[1]
    shutil.rmtree(results := BUILD / "results" / half, ignore_errors=True)
    command = [HERE / "worker.py", source, HALVES[half]["limit"], jobs]

    def run(tree: Path, results: Path, files: list[str]) -> Outcomes:
        return run_tests(half, command, tree, results, files)

    files = test_files(source, named or HALVES[half]["files"])
    files = [file for file in files if file not in HALVES[half]["leave_out"]]
    kept = cache_folder() / "upstream-tests" / f"{half}-{release.name}.jsonl"
    there = run(release, kept, files)
    found = differences(there, run(ours, results / "ours.jsonl", files))
    again = sorted(set(map(file_of, found)))  # flaky tests rarely fail twice
    sure = differences(
        run(release, results / "release-again.jsonl", again),
        run(ours, results / "ours-again.jsonl", again),
    )
    found = {test: why for test, why in sure.items() if test in found}
    accepted = tomllib.loads((HERE / "accepted.toml").read_text()).get(half, {})
    lines = report(found, accepted, files)
    passed = sum("::" in test and why == "passed" for test, why in there.items())
    print(
        f"{half}: {passed} of vLLM's tests pass on the release, {passed - len(found)} "
        f"of these here; {len(found)} differ, {len(lines)} lines to look at"
    )
    return lines


def test_files(source: Path, named: list[str]) -> list[str]:
    """The test files among and below `named`, patterns relative to `source`."""
    found = set()
    for path in (path for name in named for path in source.glob(name)):
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    return sorted(str(path.relative_to(source)) for path in found)


def run_tests(
    half: str, command: list, tree: Path, results: Path, files: list[str]
) -> Outcomes:
    """Outcomes of test files on a tree, a folder that contains `vllm`. Runs the files
    that have none in `results`, with one thread per job, offline, and without the
    user's caches."""
    path = [str(tree), os.environ.get("PYTHONPATH", "")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": str(int(half == "interpreted")),
        "HF_HOME": str(BUILD / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CACHE_ROOT": str(BUILD / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    done = read(results)
    if left := [file for file in files if file not in done]:
        print(f"{half}: {len(left)} files on {tree}", flush=True)
        words = [sys.executable, "-P", *command, results, *left]
        ended = subprocess.run(map(str, words), env=os.environ | environment)
        if ended.returncode:
            raise OverlayError(f"No test of {tree} could be run; see above.")
    return {t: outcome for t, outcome in read(results).items() if file_of(t) in files}


def lay_hub(hub: Path) -> None:
    """Writes the models of hub.toml into a Hugging Face hub cache."""
    models = tomllib.loads((HERE / "hub.toml").read_text())
    shutil.rmtree(hub, ignore_errors=True)
    for name, own in models.items():
        config = models.get(own.pop("like", None), {}) | own
        models[name] = config  # complete, for later `like`
        model = hub / f"models--{name.replace('/', '--')}"
        (files := model / "snapshots" / "0").mkdir(parents=True)
        (files / "config.json").write_text(json.dumps(config))
        for tokenizer in (ROOT / "models" / "target").glob("tokenizer*"):
            (files / tokenizer.name).symlink_to(tokenizer)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text("0")


def compare_halves(args: argparse.Namespace) -> int:
    lay_hub(BUILD / "hub" / "hub")
    halves = [args.half] if args.half else HALVES
    lines = [line for half in halves for line in compare(half, args.files, args.jobs)]
    print("\n".join(lines))
    return bool(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("upstream_tests", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.set_defaults(run=compare_halves)
    sys.exit(run_command(parser.parse_args()))
