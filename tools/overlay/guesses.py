# SPDX-License-Identifier: Apache-2.0
"""What another release may break without changing a member that we rely on.

Names in strings, and attributes of ours that the release has turned into properties.
Where a name is gone, its new place is looked up by the name alone.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .base import ROOT
from .members import DEFINITION, Source
from .relied import Key, Reader, module_paths
from .tree import PACKAGE, Release, python_files

NAMED = re.compile(rf"{PACKAGE}(\.\w+)+")


def guesses(old: Release, new: Release, root: Path = ROOT) -> Iterator[str]:
    yield from new_properties(Reader(old, root), Reader(new, root))
    yield from gone_names(old, new, root)


# Properties.


def new_properties(old: Reader, new: Reader) -> Iterator[str]:
    """Attributes that our classes set, and that are properties in the new release."""
    for path, source in new.ours.items():
        for name, member in source.members.items():
            if not isinstance(member.node, ast.ClassDef):
                continue
            for attr, line in attributes_set(source, name):
                owner = property_owner(new, (path, name), attr)
                if owner and not property_owner(old, (path, name), attr):
                    yield (
                        f"- `{path}:{line}` sets `{attr}`, which `{owner[1]}` in "
                        f"`{owner[0]}` has as a property now"
                    )


def attributes_set(source: Source, name: str) -> Iterator[tuple[str, int]]:
    """Attribute and line, for each that a class sets on itself or on instances."""
    node = source.members[name].node
    for member in source.members.values():
        owner, _, attr = member.name.rpartition(".")
        if owner == name and not isinstance(member.node, DEFINITION):
            yield attr, member.first
    for part in ast.walk(node):
        is_set = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if is_set and ast.unparse(part.value) == "self":
            yield part.attr, part.lineno


def property_owner(reader: Reader, owner: Key, attr: str) -> Key | None:
    """The class of the release that has the attribute as a property without setter."""
    for path, name in reader.lineage(owner):
        members = reader.source(path).members
        found = members.get(f"{name}.{attr}")
        if found is None or path in reader.ours or f"{name}.{attr}[2]" in members:
            continue
        decorators = getattr(found.node, "decorator_list", [])
        if any(ast.unparse(d) == "property" for d in decorators):
            return path, name
    return None


# Names.


def gone_names(old: Release, new: Release, root: Path) -> Iterator[str]:
    """Modules and their members that our Python files name, in strings or imports
    outside the package, and that only the old release has."""
    for path in python_files(root):
        for name, line in names_in(root / path, in_package=path.startswith(PACKAGE)):
            if resolves(old, name) and not resolves(new, name):
                yield f"- `{path}:{line}` names `{name}`{hint(new, name)}"


def names_in(file: Path, in_package: bool) -> Iterator[tuple[str, int]]:
    """Dotted names of the package, each with its line.

    Args:
        in_package: leave out imports, which the report tries.
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and not (in_package or node.level):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found = [str(getattr(node, "value", ""))] * isinstance(node, ast.Constant)
        yield from ((n, node.lineno) for n in found if NAMED.fullmatch(n))


def resolves(release: Release, name: str) -> bool:
    """Whether a dotted name is a module, or a member of one, as far as text tells."""
    if module_file(release, name):
        return True
    module, _, member = name.rpartition(".")
    path = module_file(release, module)
    return bool(path and re.search(rf"\b{member}\b", release.source(path).text))


def module_file(release: Release, module: str) -> str | None:
    return next((p for p in module_paths(module) if p in release.names), None)


def hint(new: Release, name: str) -> str:
    """Where the new release defines what a dotted name ends with, as far as it does."""
    word = name.rpartition(".")[2]
    found = [p for p in sorted(new.names) if p.endswith(f"/{word}.py")]
    defined = re.compile(rf"^(?:def|class) {word}\b|^{word}\b\s*[:=]", re.M)
    sources = (p for p in sorted(new.names) if p.endswith(".py"))
    found += [p for p in sources if defined.search(new.source(p).text)]
    return f", now in {', '.join(f'`{p}`' for p in found[:3])}" if found else ""
