# SPDX-License-Identifier: Apache-2.0
"""Which files of the repository a test names: by a path from its root, or by import.

A change of one has to run the test's step. What is put together while the test runs is
not seen, nor is what other modules read.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOTS = {"ROOT": "", "DOCS": "docs"}  # names that test files give folders
OWN_PARENT = re.compile(r"Path\(__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]")
PACKAGES = ("benchmarks", "tests", "tools", "vllm")


def reads(test: Path, root: Path) -> set[str]:
    """Paths below `root`, files and folders, that the source of a test names."""
    tree = ast.parse(test.read_text())
    inner = {id(n.left) for n in ast.walk(tree) if isinstance(n, ast.BinOp)}
    found = set(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and id(node) not in inner:
            found |= written_path(node, test.relative_to(root))
    folders = {path for path in found if (root / path).is_dir()}
    files = {path for path in found if (root / path).is_file()}
    return files | {f"{path.rstrip('/')}/" for path in folders}


def written_path(node: ast.expr, test: Path) -> set[str]:
    """What `ROOT / "docs" / name` says for certain: `docs`."""
    parts: list[ast.expr] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        parts.insert(0, node.right)
        node = node.left
    folder = start(node, test)
    known: list[str] = []
    for part in parts:
        if not isinstance(part, ast.Constant) or not isinstance(part.value, str):
            break
        known.append(part.value)
    return {str(folder.joinpath(*known))} if known and folder is not None else set()


def start(node: ast.expr, test: Path) -> Path | None:
    """The folder that `ROOT`, `module.DOCS` or `Path(__file__).parents[2]` is."""
    name = getattr(node, "id", getattr(node, "attr", None))
    if name in ROOTS:
        return Path(ROOTS[name])
    if found := OWN_PARENT.fullmatch(ast.unparse(node)):
        return test.parents[int(found[1])]
    return None


def imported(tree: ast.AST) -> Iterator[str]:
    """Files of the modules that it imports; of a package its `__init__.py`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names.append(node.module)
        for name in names:
            if name.partition(".")[0] in PACKAGES:
                stem = name.replace(".", "/")
                yield from (f"{stem}.py", f"{stem}/__init__.py")
