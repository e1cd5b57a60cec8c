# SPDX-License-Identifier: Apache-2.0
"""Applies the patches to the release's files, and runs their tests there."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.overlay.base import ROOT, Base
from tools.overlay.compose import unpack_install

from .export import git, identity, make_repository

NO_TESTS = 5  # exit status of pytest
IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        error = None
    except BaseException as reason:
        error = f"{type(reason).__name__}: {reason}"
    print(json.dumps([name, error]), flush=True)
"""


def apply(patches: Iterable[Path], base: Base, tree: Path) -> None:
    """Makes a repository of the release's files, with the patches on top (`git am`)."""
    shutil.rmtree(tree, ignore_errors=True)
    who = identity()
    unpack_install(base, tree)
    make_repository(tree, who)
    git(tree, "am", "--quiet", "--keep-non-patch", *map(str, patches), **who)


def try_each(tree: Path, *options: str) -> bool:
    """For each commit, imports the modules it touches, and runs the tests it adds or
    changes."""
    commits = git(tree, "rev-list", "--reverse", "HEAD").split()[1:]
    return all([try_commit(tree, commit, *options) for commit in commits])


def try_commit(tree: Path, commit: str, *options: str) -> bool:
    git(tree, "checkout", "--quiet", commit)
    print(git(tree, "log", "-1", "--format=%s"), flush=True)
    files = touched(tree, commit)
    errors = failing_imports(tree, files)
    for module, error in errors.items():
        print(f"  {module}: {error}")
    tests = [file for file in files if re.search(r"(^|/)test_\w+\.py$", file)]
    status, said = run_tests(tree, tests, *options) if tests else (NO_TESTS, "")
    print("".join(f"  {line}\n" for line in said.splitlines()[-40 if status else -1 :]))
    return not errors and status in (0, NO_TESTS)


def touched(tree: Path, commit: str = "HEAD") -> list[str]:
    """Files that a commit of the tree adds or changes."""
    return git(tree, "diff", "--name-only", f"{commit}~1", commit).splitlines()


def failing_imports(tree: Path, files: Iterable[str]) -> dict[str, str]:
    """Modules among these files that cannot be imported, with their errors."""
    ours = [f for f in files if f.startswith("vllm/") and f.endswith(".py")]
    stems = (file.removesuffix(".py").removesuffix("/__init__") for file in ours)
    modules = [stem.replace("/", ".") for stem in stems]
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT_ALL, *modules],
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('["')]
    found = dict.fromkeys(modules, "not reached: Python died at the first of these")
    found |= map(json.loads, lines)
    return {name: error for name, error in found.items() if error}


def run_tests(tree: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Runs tests of the patched tree; returns pytest's exit status and output."""
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree)]
    command += ["-o", f"pythonpath={tree}"]  # and not this repository
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment.setdefault("VLLM_TEST_MODELS", str(ROOT / "models"))
    done = subprocess.run(
        [*command, *options, *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr + done.stdout
