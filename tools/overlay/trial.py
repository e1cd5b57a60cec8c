# SPDX-License-Identifier: Apache-2.0
"""Composes the overlay over a base in a temporary folder, and imports it there."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from .base import target_device
from .compose import compose
from .seams import overlay_files, upstream_place

TIMEOUT = 600  # seconds
# Says which module it is at before it imports it, so that a crash has a name.
IMPORTS = """
import importlib, json, sys
with open(sys.argv[1], "a", buffering=1) as log:
    for name in sys.argv[2:]:
        print(json.dumps([name, "the process died or hung"]), file=log)
        try:
            importlib.import_module(name)
            error = None
        except BaseException as reason:
            error = f"{type(reason).__name__}: {reason}"
        print(json.dumps([name, error]), file=log)
"""


@dataclass
class Trial:
    """What went wrong: files that do not compile, modules with their errors."""

    broken: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)


def try_out(wheel: Path, version: str, root: Path) -> Trial:
    trial = Trial()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        seams = compose(wheel, tree, allow_changed=True, root=root)
        ours = [path for path in overlay_files(root) if path.endswith(".py")]
        paths = [*ours, *map(upstream_place, seams)]
        for path in paths:
            try:
                compile((tree / path).read_text(), path, "exec")
            except SyntaxError as error:
                trial.broken.append(f"`{path}` does not compile: {error}")
        give_metadata(tree, version)
        trial.errors = import_errors(list(map(module_name, paths)), tree)
    return trial


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def give_metadata(tree: Path, version: str) -> None:
    """Makes the tree look installed: the base asks for its own distribution.

    It takes the CPU for its platform where the version has `cpu` in it.
    """
    local = "+cpu" if target_device() == "cpu" else ""
    info = tree / f"vllm-{version}{local}.dist-info"
    (tree / "info").rename(info)
    headers = (info / "METADATA").read_text().splitlines(keepends=True)
    mine = {"Name": "vllm", "Version": f"{version}{local}"}
    for at, line in enumerate(headers):
        key = line.partition(":")[0]
        if key in mine:
            headers[at] = f"{key}: {mine.pop(key)}\n"
    (info / "METADATA").write_text("".join(headers))


def import_errors(
    modules: list[str], tree: Path | None = None, **variables: str
) -> dict[str, str]:
    """The modules that cannot be imported, each with its error.

    They are imported one after the other in a process of their own.

    Args:
        modules: full names.
        tree: folder to import `vllm` from; None takes the installed one.
        variables: environment variables to set.
    """
    environment = os.environ | variables | ({"PYTHONPATH": str(tree)} if tree else {})
    results: dict[str, str | None] = {}
    while left := [module for module in modules if module not in results]:
        with tempfile.NamedTemporaryFile("r") as log:
            command = [sys.executable, "-P", "-c", IMPORTS, log.name, *left]
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(
                    command, env=environment, capture_output=True, timeout=TIMEOUT
                )
            done = dict(map(json.loads, log.read().splitlines()))
        results |= done or {left[0]: "Python did not start"}
    return {name: error for name, error in results.items() if error}
