# SPDX-License-Identifier: Apache-2.0
"""A CPU's compiled kernels from another wheel than its Python (`[cpu.kernels]`).

The Python calls ops by name and position, so the kernels' schemas are compared with the
release's calls before anything is installed.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from .base import Base, OverlayError, find_wheel
from .tree import PACKAGE, Release

LIBRARY = f"{PACKAGE}/_C.abi3.so"  # of all CPUs, or of those with most instructions
OPS = "torch.ops._C."
ASKED = re.compile(r'hasattr\(torch\.ops\._C, "(\w+)"\)')
# In the library a schema is `name(Tensor a, int[]? b, float c=1) -> Tensor`.
SCHEMA = re.compile(rb"\0(\w+)\(((?:[^()\0]|\([^()\0]*\))*)\) -> ")


def is_library(name: str) -> bool:
    return name.endswith(".so") or ".libs/" in name


def checked_kernels(kernels: Base, release: Release) -> Path:
    """The wheel of the kernels.

    Raises:
        OverlayError: it is missing, not the pinned one, or without kernels; or the
            release calls ops that they lack or have with fewer arguments.
    """
    wheel = find_wheel(kernels)
    with ZipFile(wheel) as archive:
        if LIBRARY not in archive.namelist():
            raise OverlayError(f"{wheel.name} has no CPU kernels: it lacks {LIBRARY}.")
        schemas = op_schemas(archive.read(LIBRARY))
    if found := sorted(set(op_problems(release, schemas, kernels.outdated))):
        raise OverlayError(
            f"The kernels of {wheel.name} are not for {release.name}:\n  "
            + "\n  ".join(found)
            + "\nPin kernels of a newer release in [cpu.kernels] of base.toml; or "
            "refuse what uses these ops, and list them there as `outdated`."
        )
    return wheel


def unpack(wheel: ZipFile, libraries: Path | None, tree: Path) -> None:
    """Unpacks a release; its libraries are those of another wheel, if there is one."""
    if libraries is None:
        wheel.extractall(tree)
        return
    wheel.extractall(tree, [n for n in wheel.namelist() if not is_library(n)])
    with ZipFile(libraries) as kernels:
        kernels.extractall(tree, filter(is_library, kernels.namelist()))


def op_schemas(library: bytes) -> dict[str, int]:
    """Ops that a library defines, with their numbers of arguments."""
    return {
        name.decode(): len(args.split(b",")) if args else 0
        for name, args in SCHEMA.findall(library)
    }


def op_problems(
    release: Release, schemas: dict[str, int], outdated: tuple[str, ...]
) -> Iterator[str]:
    """Calls of a CPU's ops that the kernels cannot serve, one line each. Ops that the
    release asks for before it uses them (`hasattr`) are optional."""
    texts = {path: release.source(path).text for path in release.modules()}
    optional = {op for text in texts.values() for op in ASKED.findall(text)}
    for path in (path for path, text in texts.items() if OPS in text):
        for name, num_args, line in op_calls(release.source(path).tree):
            is_of_cpus = name.startswith("cpu_") or name.endswith("_cpu")
            if num_args > schemas.get(name, 0) > 0 and name not in outdated:
                yield (
                    f"{path}:{line} calls {name} with {num_args} arguments, they "
                    f"have it with {schemas[name]}"
                )
            elif is_of_cpus and name not in {*schemas, *optional, *outdated}:
                yield f"{path}:{line} calls {name}, which they lack"


def op_calls(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Op, number of arguments and line of each call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(OPS):
            op = ast.unparse(node.func).removeprefix(OPS)
            yield op, len(node.args) + len(node.keywords), node.lineno
