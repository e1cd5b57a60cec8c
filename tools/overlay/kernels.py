# SPDX-License-Identifier: Apache-2.0
"""A CPU's compiled kernels from another wheel than its Python (`[cpu.kernels]`).

The Python calls ops by name and position, so the kernels' schemas are compared with the
release's calls before anything is installed.
"""

import ast
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

from .base import Base, OverlayError, find_wheel
from .tree import PACKAGE, Release

LIBRARY = f"{PACKAGE}/_C.abi3.so"  # of all CPUs, or of those with most instructions
OPS = "torch.ops._C."
# In the library a schema is `name(Tensor a, int[]? b, float c=1) -> Tensor`.
SCHEMA = rb"(\w+)\(((?:[^()\0]|\([^()\0]*\))*)\) -> "
LONGEST_SCHEMA = 4096  # bytes


def is_library(name: str) -> bool:
    return name.endswith(".so") or ".libs/" in name


def checked_kernels(kernels: Base, release: Release) -> Path:
    """The wheel of the kernels.

    Raises:
        OverlayError: it is missing, not the pinned one, or for another machine; or the
            release calls ops that the kernels lack or have with fewer arguments.
    """
    wheel = find_wheel(kernels)
    if not wheel.stem.endswith(machine := platform.machine()):
        raise OverlayError(
            f"{wheel.name} has kernels for another machine than this ({machine}): set "
            f"{kernels.variable}, or [cpu.kernels] in base.toml, to a wheel for it."
        )
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
    found, end = {}, library.find(b") -> ")
    while end >= 0:
        start = library.rfind(b"\0", max(0, end - LONGEST_SCHEMA), end) + 1
        if schema := re.match(SCHEMA, library[start : end + 5]):
            name, args = schema[1].decode(), schema[2].decode()
            found[name] = len(args.split(",")) if args else 0
        end = library.find(b") -> ", end + 1)
    return found


def op_problems(
    release: Release, schemas: dict[str, int], outdated: tuple[str, ...]
) -> Iterator[str]:
    """Calls of a CPU's ops that the kernels cannot serve, one line each."""
    for path in sorted(n for n in release.names if n.endswith(".py")):
        if OPS not in release.source(path).text:
            continue
        for name, num_args, line in op_calls(release.source(path).tree):
            if name in outdated:
                continue
            if name in schemas:
                if num_args > schemas[name] > 0:
                    yield (
                        f"{path}:{line} calls {name} with {num_args} arguments, they "
                        f"have it with {schemas[name]}"
                    )
            elif is_cpu_op(name) and not is_optional(release, path, name):
                yield f"{path}:{line} calls {name}, which they lack"


def op_calls(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Op, number of arguments and line of each call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(OPS):
            op = ast.unparse(node.func).removeprefix(OPS)
            yield op, len(node.args) + len(node.keywords), node.lineno


def is_cpu_op(name: str) -> bool:
    return name.startswith("cpu_") or name.endswith("_cpu")


def is_optional(release: Release, path: str, name: str) -> bool:
    """Whether the release asks for an op before it uses it."""
    asks = f'hasattr(torch.ops._C, "{name}")'
    sources = (n for n in release.names if n.endswith(".py"))
    return any(asks in release.source(n).text for n in (path, *sources))
