# SPDX-License-Identifier: Apache-2.0
"""Applies an exported series to the base's files, and runs what it brings there."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from tools.overlay.base import ROOT, load_config
from tools.overlay.trial import give_metadata, import_errors, module_name

from .results import WHOLE, Tried, counted
from .tree import LIBRARY, git, identity, make_base

PASSED, NO_TESTS = 0, 5  # exit status of pytest


def apply_series(patches: Iterable[Path], wheel_path: Path, tree: Path) -> None:
    """The base's files in a repository, and the patches on top by `git am`."""
    who, version = identity(), load_config()["version"]
    with ZipFile(wheel_path) as wheel:
        make_base(wheel, tree, version, who)
        git(tree, "am", "--quiet", "--keep-non-patch", *map(str, patches), **who)
        make_importable(tree, wheel, version)


def make_importable(tree: Path, wheel: ZipFile, version: str) -> None:
    """Adds what git does not track: compiled libraries, and the installed look."""
    (tree / ".git" / "info" / "exclude").write_text(f"*{LIBRARY}\n*.dist-info\n")
    names = [n for n in wheel.namelist() if ".dist-info/" in n]
    wheel.extractall(tree, names)
    (info,) = tree.glob("*.dist-info")
    info.rename(tree / "info")
    give_metadata(tree, version)
    installed = Path(find_spec("vllm").origin).parents[1]
    for name in wheel.namelist():
        if name.endswith(LIBRARY):
            source = installed / name
            if source.is_file():
                (tree / name).symlink_to(source.resolve())
            else:
                wheel.extract(name, tree)


def touched(tree: Path, commit: str = "HEAD") -> list[str]:
    """Files that a commit of the tree adds or changes."""
    return git(tree, "diff", "--name-only", f"{commit}~1", commit).splitlines()


def failing_imports(tree: Path, files: Iterable[str]) -> dict[str, str]:
    """Of these files the modules that cannot be imported, with their errors."""
    return import_errors([module_name(f) for f in files if is_module(f)], tree)


def is_module(file: str) -> bool:
    return file.startswith("vllm/") and file.endswith(".py")


def run_tests(tree: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Runs tests of the patched tree; returns the exit status and what pytest says."""
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree), "-q"]
    command += ["-o", f"pythonpath={tree}"]  # and nothing of this repository
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "VLLM_TEST_MODELS": os.environ.get("VLLM_TEST_MODELS", str(ROOT / "models")),
    }
    done = subprocess.run(
        [*command, *options, *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_files(files: Iterable[str]) -> list[str]:
    return [file for file in files if re.search(r"(^|/)test_\w+\.py$", file)]


def try_each(tree: Path, *options: str) -> Iterator[Tried]:
    """Walks the commits: imports what each touches, and runs the tests it brings."""
    for commit in git(tree, "rev-list", "--reverse", "HEAD").split()[1:]:
        git(tree, "checkout", "--quiet", commit)
        title = git(tree, "log", "-1", "--format=%s")
        yield _try(title.strip(), tree, touched(tree), options)


def try_all(tree: Path, *options: str) -> Iterator[Tried]:
    """Imports everything that the series touches, and runs all tests it brings."""
    commits = git(tree, "rev-list", "HEAD").split()[:-1]
    files = sorted({file for commit in commits for file in touched(tree, commit)})
    yield _try(WHOLE, tree, files, options)


def _try(title: str, tree: Path, files: list[str], options: tuple[str, ...]) -> Tried:
    print(title, flush=True)
    broken, counts = failing_imports(tree, files), {}
    for module, error in broken.items():
        print(f"  {module}: {error}")
    if tests := sorted(test_files(files)):
        status, said = run_tests(tree, tests, *options)
        print("  " + "\n  ".join(said.strip().splitlines()[-40 if status else -1 :]))
        counts = counted(said)
        if status not in (PASSED, NO_TESTS) and not counts.get("failed"):
            counts["errors"] = max(counts.get("errors", 0), 1)
    modules = len([f for f in files if is_module(f)])
    return Tried(title, modules, broken, counts, len(tests))


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder
