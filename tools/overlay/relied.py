# SPDX-License-Identifier: Apache-2.0
"""Finds the members of the release that our lines rely on, by syntax trees.

These are what additions and edits import, or name in a string; and of these modules,
these classes and their base classes the members with a name that the addition uses or
defines anywhere. Types are unknown: if the name is that of another object, there is one
member more to review.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from itertools import chain
from pathlib import Path

from .base import ROOT
from .edits import SUFFIX
from .members import IMPORTS, Source
from .tree import PACKAGE, Release, additions, edit_files, module_paths

NAMED = re.compile(rf"{PACKAGE}(\.\w+)+")
Key = tuple[str, str]  # path, member


class Reader:
    """Resolves names in our files and in the release's."""

    def __init__(self, release: Release, root: Path = ROOT) -> None:
        self.release = release
        self.ours = {
            path: Source(path, (root / path).read_text())
            for path in additions(root)
            if path.endswith(".py")
        }
        for edit in edit_files(root):
            imports = (hunk.lines for hunk in edit.hunks() if hunk.member == IMPORTS)
            path = edit.path + SUFFIX
            self.ours[path] = Source(path, "".join(chain(*imports)))
        self.imports = cache(self._imports)

    def relied_on(self) -> set[Key]:
        found = (key for source in self.ours.values() for key in self.uses(source))
        return {key for key in found if key[0] not in self.ours}

    def uses(self, source: Source) -> Iterator[Key]:
        names, made = names_of(source)
        for module, name in self.imports(source).values():
            if path := self.path_of(f"{module}.{name}"):
                found = [self.find(self.source(path), each) for each in names]
            else:
                path = self.path_of(module)
                found = [self.find(self.source(path), name)] if path else []
            for key in filter(None, found):
                yield key
                for owner, cls in self.lineage(key):
                    wanted = names | {"__init__"} if key[1] in made else names
                    members = {f"{cls}.{each}" for each in wanted}
                    members &= self.source(owner).members.keys()
                    yield from ((owner, member) for member in members)

    def lineage(self, owner: Key) -> Iterator[Key]:
        """A class and its base classes, as far as they are known; else nothing."""
        path, name = owner
        node = self.source(path).members[name].node
        if isinstance(node, ast.ClassDef):
            yield owner
            for base in map(ast.unparse, node.bases):
                above = self.find(self.source(path), base)
                yield from self.lineage(above) if above and above != owner else ()

    def source(self, path: str) -> Source:
        return self.ours.get(path) or self.release.source(path)

    def find(self, source: Source, name: str, depth: int = 0) -> Key | None:
        """The member that a name refers to, wherever it is defined."""
        if name in source.members:
            return source.path, name
        module, there = self.imports(source).get(name, ("", ""))
        path = self.path_of(module)
        if path is None or depth == 9:
            return None
        return self.find(self.source(path), there, depth + 1)

    def path_of(self, module: str) -> str | None:
        paths = module_paths(module)
        return next(
            (p for p in paths if p in self.ours or p in self.release.names), None
        )

    def _imports(self, source: Source) -> dict[str, tuple[str, str]]:
        """The module, and the name in it, of from-imports by local name, and of dotted
        names in strings."""
        package, found = source.path.rpartition("/")[0].replace("/", "."), {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom):
                module = resolve_name("." * node.level + (node.module or ""), package)
                for alias in node.names:
                    found[alias.asname or alias.name] = module, alias.name
            elif NAMED.fullmatch(text := str(getattr(node, "value", ""))):
                module, _, name = text.rpartition(".")
                found[text] = module, name
        return found


def names_of(source: Source) -> tuple[set[str], set[str]]:
    """Attributes, keywords and members of a file; what it calls or derives from."""
    names, made = {name.rpartition(".")[2] for name in source.members}, list[ast.expr]()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Call):
            names.update(keyword.arg for keyword in node.keywords if keyword.arg)
            made.append(node.func)
        elif isinstance(node, ast.ClassDef):
            made += node.bases
    return names - {"__init__"}, {ast.unparse(node).rpartition(".")[2] for node in made}
