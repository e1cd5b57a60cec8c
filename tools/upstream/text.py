# SPDX-License-Identifier: Apache-2.0
"""Python source as lines with a syntax tree: cut parts out, put parts in."""

import ast
from collections.abc import Iterable
from textwrap import dedent, indent

from tools.overlay.base import OverlayError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# A node and the text that takes its place.
Swap = tuple[ast.AST, str]


class FoldError(OverlayError):
    """A seam has a shape that cannot be folded; the message says what to change."""


class Source:
    """A module's text. Lines are numbered from 1; columns count bytes, as ast does."""

    def __init__(self, path: str, text: str):
        self.path, self.text = path, text
        self.lines = text.encode().splitlines()
        self.tree = ast.parse(text)

    def error(self, node: ast.AST, what: str) -> FoldError:
        return FoldError(f"{self.path}:{getattr(node, 'lineno', 1)}: {what}")

    def start(self, node: ast.stmt) -> int:
        """The first line of a statement, decorators and comments above included."""
        above = [part.lineno for part in getattr(node, "decorator_list", [])]
        first = min([node.lineno, *above])
        while first > 1 and self.lines[first - 2].lstrip().startswith(b"#"):
            first -= 1
        return first

    def cut(self, body: list[ast.stmt], swaps: Iterable[Swap] = ()) -> str:
        """The text of consecutive statements, at no indentation, nodes swapped."""
        if not body:
            return ""
        first, last = self.start(body[0]), body[-1].end_lineno
        lines = list(self.lines[:last])
        for node, new in sorted(swaps, key=lambda swap: _place(swap[0]), reverse=True):
            if first <= node.lineno and node.end_lineno <= last:
                line, end = node.lineno - 1, node.end_lineno - 1
                tail = lines[end][node.end_col_offset :]
                head = lines[line][: node.col_offset]
                lines[line : end + 1] = [head + new.encode() + tail]
                last -= end - line
        return dedent(b"\n".join(lines[first - 1 : last]).decode()) + "\n"

    def edited(self, edits: "Edits") -> str:
        lines = [line.decode() for line in self.lines]
        for first, last, new in sorted(edits.parts, key=lambda e: e[:2], reverse=True):
            lines[first - 1 : last] = new.splitlines()
        return "\n".join(lines) + "\n"


class Edits:
    """Changes of a Source: `first` to `last` become `new`; `last` < `first` inserts."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int, str]] = []

    def replace(self, first: int, last: int, new: str) -> None:
        self.parts.append((first, last, new))

    def after(self, line: int, new: str, ahead: bool = False) -> None:
        """Inserts after what has been inserted at a line, or `ahead` of it."""
        for at, (first, last, known) in enumerate(self.parts):
            if (first, last) == (line + 1, line):
                self.parts[at] = (first, last, new + known if ahead else known + new)
                return
        self.parts.append((line + 1, line, new))


def _place(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.col_offset


def shifted(text: str, columns: int) -> str:
    return indent(text, " " * columns)


def docstring(node: ast.AST) -> list[ast.stmt]:
    """The statement that is the docstring of a module, class or function, if any."""
    return node.body[:1] if ast.get_docstring(node, clean=False) is not None else []


def without_docstring(node: ast.AST) -> list[ast.stmt]:
    return node.body[len(docstring(node)) :]


def own_nodes(body: list[ast.stmt]) -> list[ast.AST]:
    """All nodes of statements but those in functions and classes within them."""
    found, left = [], list(body)
    while left:
        node = left.pop()
        found.append(node)
        if not isinstance(node, Definition | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Names that statements bind in their own scope, but for comprehensions'."""
    names, nodes = set(), own_nodes(body)
    inner = [n.target for n in nodes if isinstance(n, ast.comprehension)]
    inner = {id(part) for target in inner for part in ast.walk(target)}
    for node in nodes:
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names |= {node.id} if id(node) not in inner else set()
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(a.asname or a.name).partition(".")[0] for a in node.names}
    return names


def used_names(text: str) -> set[str]:
    return {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}


def binding(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The statement of a module or class body that binds a name; the last one."""
    return next((node for node in reversed(body) if name in bound_names([node])), None)


def annotations(tree: ast.AST) -> list[ast.AST]:
    """All nodes within type annotations."""
    found = []
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            hint = getattr(node, name, None)
            found += ast.walk(hint) if hint is not None else []
    return found
