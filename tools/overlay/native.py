# SPDX-License-Identifier: Apache-2.0
"""Builds the native kernels, `csrc/`, into a composed tree for CPUs.

An install never fails because of them: without the library, a CPU drafts chains.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .base import ROOT

COMPILERS = ("c++", "g++", "clang++")


def compiler() -> str | None:
    """Path of the C++ compiler that CMake will find: `CXX`, else a common name."""
    given = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, given or COMPILERS)), None)


def build_requirements() -> list[str]:
    """Packages that a build needs and that this machine lacks."""
    if compiler() is None:
        return []
    wanted = [] if shutil.which("cmake") else ["cmake>=3.18"]
    return wanted + ([] if shutil.which("ninja") or shutil.which("make") else ["ninja"])


def build(tree: Path, root: Path = ROOT) -> str | None:
    """Builds the libraries and installs them into `tree`.

    Returns:
        None, or the line that was printed: what is missing, and what to do.
    """
    if compiler() is None:
        why = f"there is no C++ compiler ({', '.join(COMPILERS)}, or CXX=<one>)"
    else:
        why = _run_cmake(tree, root) if shutil.which("cmake") else "there is no cmake"
    if why is None:
        return None
    line = (
        f"The native kernels were not built: {why}. On a CPU chains "
        "are drafted instead of trees; repair this and install again."
    )
    print(line, file=sys.stderr)
    return line


def _run_cmake(tree: Path, root: Path) -> str | None:
    """Builds and installs; returns the reason if that fails, else None."""
    with tempfile.TemporaryDirectory() as folder:
        configure = ["-S", str(root), "-B", folder, "-DCMAKE_BUILD_TYPE=Release"]
        configure += ["-G", "Ninja"] if shutil.which("ninja") else []
        install = ["--install", folder, "--prefix", str(tree)]
        for options in (configure, ["--build", folder], install):
            command = ["cmake", *options]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if done.returncode:
                return f"`{shlex.join(command[:2])}` failed: {_reason(done.stdout)}"
    return None


def _reason(output: str) -> str:
    """The first line that names an error, else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line, re.I)]
    return [*errors, *lines[-1:], "no message"][0]
