# SPDX-License-Identifier: Apache-2.0
"""The composed tree as syntax trees: what our files override in the base's.

Nothing is imported, so that a base can be read on a machine that cannot run it.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import resolve_name
from pathlib import Path
from zipfile import ZipFile

from .seams import overlay_files, upstream_place


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those inside if, try and with, which define names as well."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from flat(getattr(node, block, []))


def defined(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module or class body defines."""
    for node in flat(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node


def members(text: str) -> dict[str, str]:
    """Source of each name of a module and, as `Class.name`, of its classes."""
    lines = text.encode().splitlines(keepends=True)  # by line ends as ast counts them
    found: dict[str, str] = {}

    def add(name: str, node: ast.stmt) -> None:
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators])
        source = b"".join(lines[first - 1 : node.end_lineno]).decode()
        found[name] = found.get(name, "") + source  # more than one: overloads

    for name, node in defined(ast.parse(text).body):
        add(name, node)
        if isinstance(node, ast.ClassDef):
            for inner, part in defined(node.body):
                add(f"{name}.{inner}", part)
    return found


@dataclass
class Stand:
    """What of one base file our files stand on."""

    by: set[str] = field(default_factory=set)  # our files
    classes: set[str] = field(default_factory=set)  # what they subclass
    members: set[str] = field(default_factory=set)  # what they override or use

    def __or__(self, other: "Stand") -> "Stand":
        return Stand(
            self.by | other.by,
            self.classes | other.classes,
            self.members | other.members,
        )


class Sources:
    """The modules of the tree that a base and this overlay would compose to."""

    def __init__(self, wheel: ZipFile, root: Path) -> None:
        self.wheel, self._trees = wheel, dict[str, ast.Module]()
        # Path in the tree to where its text is: a name in the wheel, a file of ours.
        self.places: dict[str, str | Path] = {
            name: name for name in wheel.namelist() if name.endswith(".py")
        }
        self.ours = [path for path in overlay_files(root) if path.endswith(".py")]
        self.seams = [path for path in self.ours if path in self.places]
        self.places |= {upstream_place(path): path for path in self.seams}
        self.places |= {path: root / path for path in self.ours}

    def text(self, path: str) -> str:
        place = self.places[path]
        if isinstance(place, Path):
            return place.read_text()
        return self.wheel.read(place).decode()

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            try:
                self._trees[path] = ast.parse(self.text(path))
            except SyntaxError:  # told by trial.py, which compiles every file
                self._trees[path] = ast.Module([], [])
        return self._trees[path]

    def path_of(self, module: str) -> str | None:
        stem = module.replace(".", "/")
        paths = (f"{stem}.py", f"{stem}/__init__.py")
        return next((path for path in paths if path in self.places), None)

    def imports(self, path: str) -> Iterator[tuple[str, str, str]]:
        """The from-imports of a file: local name, module, name there."""
        place = self.places[path]
        home = path if isinstance(place, Path) else place
        package = home.rpartition("/")[0].replace("/", ".")
        for node in ast.walk(self.tree(path)):
            if isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                for alias in node.names:
                    name = resolve_name(module, package)
                    yield alias.asname or alias.name, name, alias.name

    def find(self, path: str, name: str, depth: int = 0) -> tuple[str, ast.stmt] | None:
        """The file and statement that define what `name` means in a file."""
        for known, node in defined(self.tree(path).body):
            if known == name:
                return path, node
        for local, module, there in self.imports(path):
            place = self.path_of(module) if local == name else None
            if place and depth < 9 and (found := self.find(place, there, depth + 1)):
                return found
        if path in self.seams:
            return self.find(upstream_place(path), name, depth + 1)
        return None

    def has(self, module: str, name: str) -> bool:
        path = self.path_of(module)
        found = self.find(path, name) if path else None
        return bool(found or self.path_of(f"{module}.{name}"))

    def find_class(self, path: str, node: ast.expr) -> tuple[str, ast.ClassDef] | None:
        """The class that an expression such as `Name` or `module.Name` means."""
        found = None
        if isinstance(node, ast.Name):
            found = self.find(path, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            place = self.module_named(path, node.value.id)
            found = self.find(place, node.attr) if place else None
        if found and isinstance(found[1], ast.Assign):  # an alias of a class
            value = found[1].value
            return self.find_class(found[0], value) if value is not node else None
        return found if found and isinstance(found[1], ast.ClassDef) else None

    def lineage(
        self, path: str, node: ast.ClassDef
    ) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and all above it that the tree has, each with its file."""
        yield path, node
        for expression in node.bases:
            found = self.find_class(path, expression)
            if found and found[1] is not node:
                yield from self.lineage(*found)

    def module_named(self, path: str, name: str) -> str | None:
        if name in upstream_names(self.tree(path)):
            return upstream_place(path)
        for local, module, there in self.imports(path):
            if local == name:
                return self.path_of(f"{module}.{there}")
        return None

    def ancestors(
        self, path: str, node: ast.ClassDef
    ) -> Iterator[tuple[str, ast.ClassDef]]:
        """The base's classes above a class, each with its file in the base."""
        for expression in node.bases:
            found = self.find_class(path, expression)
            if found and found[1] is not node:
                place = self.places[found[0]]
                if isinstance(place, str):
                    yield place, found[1]
                yield from self.ancestors(*found)


def upstream_names(tree: ast.Module) -> set[str]:
    """What a seam calls the module that it stands on: `upstream = stand_on(...)`."""
    return {
        name
        for name, node in defined(tree.body)
        if isinstance(getattr(node, "value", None), ast.Call)
        and ast.unparse(node.value.func).endswith("stand_on")
    }


def stands(sources: Sources) -> dict[str, Stand]:
    """For each base file that we stand on, the members we override or reach into."""
    found: dict[str, Stand] = {}
    for path in sources.seams:
        stand = found.setdefault(path, Stand())
        stand.by.add(path)
        stand.members |= seam_members(sources, path)
    for path in sources.ours:
        for _, node in defined(sources.tree(path).body):
            if not isinstance(node, ast.ClassDef):
                continue
            names = {name for name, _ in defined(node.body)} | set_on_self(node)
            for place, parent in sources.ancestors(path, node):
                theirs = {name for name, _ in defined(parent.body)}
                stand = found.setdefault(place, Stand())
                stand.by.add(path)
                stand.classes.add(parent.name)
                stand.members |= {f"{parent.name}.{name}" for name in names & theirs}
    return found


def seam_members(sources: Sources, path: str) -> set[str]:
    """Names of the upstream file that its seam defines anew or reaches for.

    Of a class that is patched, it is the patched members; one that is subclassed
    does not count here, see `stands`.
    """
    tree = sources.tree(path)
    shown = dict.fromkeys(upstream_names(tree), "")  # local name to upstream's
    names = set()
    for name, node in defined(tree.body):
        value = ast.unparse(getattr(node, "value", None) or ast.Constant(0))
        root, _, there = value.partition(".")
        if there.isidentifier() and root in shown:
            shown[name] = f"{there}."
        else:
            names.add(name)
    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Attribute):
            root, _, name = ast.unparse(node).partition(".")
            names |= {shown[root] + name} if root in shown else set()
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(sources.ancestors(path, node)):
            bases = (ast.unparse(base).partition(".")[2] for base in node.bases)
            names -= {node.name, *bases}
    names &= members(sources.text(upstream_place(path))).keys()
    return names - {name.rpartition(".")[0] for name in names}


def set_on_self(node: ast.ClassDef) -> set[str]:
    """Attributes a class assigns: a base that makes one a property breaks them."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }
