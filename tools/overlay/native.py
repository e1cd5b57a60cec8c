# SPDX-License-Identifier: Apache-2.0
"""Compiles the native kernel, `csrc/`, into a composed tree for CPUs.

An install never fails because of it: without the library, a CPU drafts chains.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .base import ROOT

COMPILERS = ("c++", "g++", "clang++")
SOURCE = "csrc/tree_attention.cpp"
# Beside the Python that calls it.
LIBRARY = "vllm/v1/worker/gpu/spec_decode/unified/tree/_tree_attention.so"
# It uses headers of the C++ library only, and runs wherever vLLM's wheel runs. The same
# source gives the same bytes, wherever and whenever it is compiled.
FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-static-libstdc++"]
FLAGS += ["-static-libgcc", "-Wall", "-Wextra", "-Werror=date-time"]


def compiler() -> list[str]:
    """`CXX`, else a common C++ compiler; empty without one."""
    given = shlex.split(os.environ.get("CXX", ""))
    choices = [given] if given else [[name] for name in COMPILERS]
    return next((words for words in choices if shutil.which(words[0])), [])


def build(tree: Path, root: Path = ROOT) -> str | None:
    """Compiles the library into `tree`.

    Returns:
        None, or the line that was printed: what is missing, and what to do.
    """
    if not (command := compiler()):
        why = f"there is no C++ compiler ({', '.join(COMPILERS)}, or CXX=<one>)"
    elif (why := _compile(command, tree, root)) is None:
        return None
    line = (
        f"The native kernel was not built: {why}. On a CPU chains are drafted instead "
        "of trees; repair this and install again."
    )
    print(line, file=sys.stderr)
    return line


def _compile(command: list[str], tree: Path, root: Path) -> str | None:
    """The reason if that fails, else None."""
    command = [*command, *FLAGS, f"-ffile-prefix-map={root}=."]
    (library := tree / LIBRARY).parent.mkdir(parents=True, exist_ok=True)
    command += [str(root / SOURCE), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        library.chmod(0o644)
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b", line, re.I)]
    return f"`{command[0]} {SOURCE}` failed: {[*errors, *lines[-1:], 'no message'][0]}"
