# SPDX-License-Identifier: Apache-2.0
"""Reads a seam: what it overrides, adds and sets in the module that it stands on."""

import ast
from dataclasses import dataclass, field

from tools.overlay.sources import upstream_names

from .text import Definition, Source, Swap, bound_names, docstring


@dataclass
class Seam:
    """A seam's statements, sorted by what folding does with them.

    Attributes:
        overrides: name in the base, a function's or `Class.method`, to the function.
        classes: classes that subclass the base's of the same name.
        loose: all else, in order: new names, and statements.
        imports: name to the statement that imports it.
        aliases: name in the seam to name in the base.
        published: overrides that the base's own code is given, too.
        registered: overrides that are put into a registry of the base's.
    """

    source: Source
    overrides: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: list[ast.ClassDef] = field(default_factory=list)
    loose: list[ast.stmt] = field(default_factory=list)
    imports: dict[str, ast.stmt] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    published: set[str] = field(default_factory=set)
    registered: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.modules = upstream_names(self.source.tree)
        self.defined = bound_names(self.source.tree.body)

    def in_base(self, node: ast.AST) -> str | None:
        """The base's name that an expression means: `upstream.f`, or an alias."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return node.attr
        owner = self.in_base(node.value)
        return f"{owner}.{node.attr}" if owner else None

    def swaps(self, node: ast.AST) -> list[Swap]:
        """For each expression that means one of the base's names, that name."""
        name = self.in_base(node) if isinstance(node, ast.expr) else None
        if name is not None:
            same = isinstance(node, ast.Name) and node.id == name
            return [] if same else [(node, name)]
        return [s for child in ast.iter_child_nodes(node) for s in self.swaps(child)]

    def text(self, body: list[ast.stmt], swaps: list[Swap] = []) -> str:  # noqa: B006
        known = {id(part) for node, _ in swaps for part in ast.walk(node)}
        more = [s for node in body for s in self.swaps(node) if id(s[0]) not in known]
        return self.source.cut(body, swaps + more)


def read_seam(source: Source, base: Source, dropped: tuple[str, ...] = ()) -> Seam:
    """Sorts a seam's statements.

    Args:
        source: the seam.
        base: the module that it stands on.
        dropped: what statements start with that the fold leaves out.
    """
    seam = Seam(source)
    theirs = bound_names(base.tree.body)
    tree = source.tree
    for node in tree.body[len(docstring(tree)) :]:
        if not ast.unparse(node).startswith(dropped or ("\0",)):
            _sort(seam, node, theirs)
    return seam


def _sort(seam: Seam, node: ast.stmt, theirs: set[str]) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        for alias in node.names:
            seam.imports[alias.asname or alias.name] = node
    elif isinstance(node, ast.ClassDef) and node.name in theirs:
        seam.classes.append(node)
    elif isinstance(node, ast.FunctionDef) and node.name in theirs:
        seam.overrides[node.name] = node
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        _sort_assignment(seam, node, node.targets[0])
    elif not _stands(node):
        seam.loose.append(node)


def _sort_assignment(seam: Seam, node: ast.Assign, target: ast.expr) -> None:
    if _stands(node):
        return
    meant = seam.in_base(node.value)
    if isinstance(target, ast.Name) and meant:
        seam.aliases[target.id] = meant
        return
    owner = target.value if isinstance(target, ast.Subscript) else target
    place = seam.in_base(owner)
    if place is None or not isinstance(node.value, ast.Name):
        seam.loose.append(node)
        return
    # `upstream.f = f`, `Class.method = f`, `upstream.REGISTRY["f"] = f`: the base shall
    # see the override. Folded, it does.
    name = node.value.id
    (seam.published if owner is target else seam.registered).add(node.value.id)
    functions = [n for n in seam.loose if isinstance(n, Definition) and n.name == name]
    if functions and owner is target:
        seam.loose.remove(functions[0])
        seam.overrides[place] = functions[0]
    elif name not in seam.overrides and name not in {c.name for c in seam.classes}:
        raise seam.source.error(
            node, f"sets the base's {place}: define {name} in the seam, as an override"
        )


def _stands(node: ast.stmt) -> bool:
    value = getattr(node, "value", None)
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "stand_on"
