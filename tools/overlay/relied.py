# SPDX-License-Identifier: Apache-2.0
"""Finds the members of the release that our additions rely on, by syntax trees.

These are what they import, and members of the release's classes that they call, read or
override: by the class's name, on `self` in a subclass, or on a parameter with the class
as its annotation. Types of other variables are unknown, so their members are left out.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from .base import ROOT
from .members import Source
from .tree import Release, additions

Key = tuple[str, str]  # path, member


def relied_on(release: Release, root: Path = ROOT) -> set[Key]:
    reader = Reader(release, root)
    found = (key for source in reader.ours.values() for key in reader.uses(source))
    return {key for key in found if key[0] not in reader.ours}


class Reader:
    """Resolves names in our files and in the release's."""

    def __init__(self, release: Release, root: Path) -> None:
        self.release = release
        self.ours = {
            path: Source(path, (root / path).read_text())
            for path in additions(root)
            if path.endswith(".py")
        }
        self.imports = cache(self._imports)

    # What a file of ours relies on.

    def uses(self, source: Source) -> Iterator[Key]:
        for name, member in source.members.items():
            if isinstance(member.node, ast.ClassDef):
                read = read_of(member.node, "self", "super()") | {"__init__"}
                defined = (n.rpartition(".") for n in source.members)
                read |= {own for owner, _, own in defined if owner == name}
                yield from self.having((source.path, name), read)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                names = (alias.asname or alias.name for alias in node.names)
                yield from filter(None, (self.find(source, name) for name in names))
            elif isinstance(node, ast.Attribute):
                yield from self.having(self.meaning(source, node.value), [node.attr])
                yield from filter(None, [self.meaning(source, node)])
            elif isinstance(node, ast.Call):
                names = [k.arg for k in node.keywords]
                yield from self.having(
                    self.meaning(source, node.func), ["__init__", *names]
                )
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for argument in [*node.args.args, *node.args.kwonlyargs]:
                    owner = self.annotated(source, argument.annotation)
                    yield from self.having(owner, read_of(node, argument.arg))

    def annotated(self, source: Source, node: ast.expr | None) -> Key | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        node = node.left if isinstance(node, ast.BinOp) else node  # X | None
        return self.meaning(source, node) if node else None

    def having(self, owner: Key | None, names: Iterable[str | None]) -> Iterator[Key]:
        """Members with these names, of a class and its base classes."""
        for path, name in self.lineage(owner) if owner else ():
            wanted = (f"{name}.{n}" for n in names)
            yield from ((path, n) for n in wanted if n in self.source(path).members)

    def lineage(self, owner: Key) -> Iterator[Key]:
        path, name = owner
        node = self.source(path).members[name].node
        if isinstance(node, ast.ClassDef):
            yield owner
            for base in node.bases:
                above = self.meaning(self.source(path), base)
                yield from self.lineage(above) if above and above != owner else ()

    # Resolution of names.

    def source(self, path: str) -> Source:
        return self.ours.get(path) or self.release.source(path)

    def meaning(self, source: Source, node: ast.expr) -> Key | None:
        """The member that `name` or `module.name` refers to, wherever it is defined."""
        if isinstance(node, ast.Name):
            return self.find(source, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = self.imports(source).get(node.value.id, ("", ""))
            path = self.path_of(f"{module}.{name}")
            return self.find(self.source(path), node.attr) if path else None
        return None

    def find(self, source: Source, name: str, depth: int = 0) -> Key | None:
        if name in source.members:
            return source.path, name
        module, there = self.imports(source).get(name, ("", ""))
        path = self.path_of(module)
        return (
            self.find(self.source(path), there, depth + 1)
            if path and depth < 9
            else None
        )

    def path_of(self, module: str) -> str | None:
        paths = module_paths(module)
        return next(
            (p for p in paths if p in self.ours or p in self.release.names), None
        )

    def _imports(self, source: Source) -> dict[str, tuple[str, str]]:
        """From-imports by local name: the module, and the name in it."""
        package = source.path.rpartition("/")[0].replace("/", ".")
        return {
            alias.asname or alias.name: (
                resolve_name("." * node.level + (node.module or ""), package),
                alias.name,
            )
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }


def module_paths(module: str) -> tuple[str, str]:
    """The files that a module or a package of this name may be."""
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def read_of(node: ast.AST, *receivers: str) -> set[str]:
    """Names of the attributes that are read or set on these expressions."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) in receivers
    }
