# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of each patch on the release's files with the patches up to it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tools.overlay.base import ROOT

from .export import git

NO_TESTS = 5  # exit status of pytest


def try_each(tree: Path, *options: str) -> bool:
    """For each commit, runs the tests that it adds or changes."""
    commits = git(tree, "rev-list", "--reverse", "HEAD").split()[1:]
    return all([try_commit(tree, commit, *options) for commit in commits])


def try_commit(tree: Path, commit: str, *options: str) -> bool:
    git(tree, "checkout", "--quiet", commit)
    print(git(tree, "log", "-1", "--format=%s"), flush=True)
    files = git(tree, "diff", "--name-only", f"{commit}~1", commit).splitlines()
    tests = [file for file in files if re.search(r"(^|/)test_\w+\.py$", file)]
    status, said = run_tests(tree, tests, *options) if tests else (NO_TESTS, "")
    print("".join(f"  {line}\n" for line in said.splitlines()[-40 if status else -1 :]))
    return status in (0, NO_TESTS)


def run_tests(tree: Path, tests: list[str], *options: str) -> tuple[int, str]:
    """Runs tests of the patched tree; returns pytest's exit status and output."""
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tree)]
    command += ["-o", f"pythonpath={tree}"]  # and not this repository
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment.setdefault("VLLM_TEST_MODELS", str(ROOT / "models"))
    how = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, *options, *tests], **how)
    return done.returncode, done.stderr + done.stdout
