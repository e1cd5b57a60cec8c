# SPDX-License-Identifier: Apache-2.0
"""A Python file by its members: functions, classes, methods, and assigned names."""

import ast
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

MODULE, IMPORTS = "module", "imports"  # anchors that are no members


@dataclass(frozen=True)
class Member:
    """Where a member stands: lines count from 1, decorators and a field's docstring
    included. Members of a class are members too."""

    name: str
    first: int
    last: int
    node: ast.AST

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


def flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those inside if, try and with, which define names as well."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from flat(getattr(node, block, []))


def name_of(node: ast.stmt) -> str | None:
    """What a statement defines; None for those that define nothing, or too much."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    one = targets[0] if len(targets) == 1 else None
    return one.id if isinstance(one, ast.Name) else None


def found_in(body: list[ast.stmt], owner: str = "") -> Iterator[Member]:
    top = set(map(id, body))
    following = dict(zip(map(id, body), body[1:], strict=False))
    for node in flat(body):
        name = name_of(node)
        is_value = isinstance(node, (ast.Assign, ast.AnnAssign))
        if name is None or (is_value and id(node) not in top):
            continue
        marks = getattr(node, "decorator_list", [])
        last = node.end_lineno
        after = following.get(id(node))
        is_told = is_value and isinstance(after, ast.Expr)
        if is_told and isinstance(after.value, ast.Constant):
            last = after.end_lineno
        first = min(part.lineno for part in [node, *marks])
        yield Member(owner + name, first, last, node)
        if isinstance(node, ast.ClassDef):
            yield from found_in(node.body, f"{owner}{name}.")


class Source:
    """The text of a module, and its members by qualified name.

    A name that is defined again, as overloads and setters are, is `name[2]` then.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines = list(io.StringIO(text))  # by line ends as ast counts them

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def members(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        for member in found_in(self.tree.body):
            name, count = member.name, 1
            while name in found:
                count += 1
                name = f"{member.name}[{count}]"
            found[name] = Member(name, member.first, member.last, member.node)
        return found

    @cached_property
    def last_import(self) -> int:
        """Last line of the imports before the first function or class.

        Without any, of the docstring or the comments at the file's top.
        """
        body, last = self.tree.body, 0
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                break
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                last = node.end_lineno
        if last == 0 and ast.get_docstring(self.tree) is not None:
            return body[0].end_lineno
        top = takewhile(lambda line: line.startswith("#"), self.lines)
        return last or len(list(top))

    def span(self, name: str) -> tuple[int, int] | None:
        """First and last line of a member or of the module; None if it is not there."""
        if name == MODULE:
            return 1, len(self.lines)
        member = self.members.get(name)
        return member and (member.first, member.last)

    def innermost(self, first: int, last: int) -> str:
        """The smallest member that holds these lines, or else the module."""
        holding = [
            m for m in self.members.values() if m.first <= first and last <= m.last
        ]
        least = min(holding, key=lambda m: m.last - m.first, default=None)
        return least.name if least else MODULE

    def own_text(self, name: str) -> str:
        """A member's text; of a class, and of the module, without its members'."""
        span = self.span(name)
        if span is None:
            return ""
        inner = set()
        for member in self.members.values():
            if name == MODULE or member.name.startswith(f"{name}."):
                inner.update(range(member.first, member.last + 1))
        numbers = range(span[0], span[1] + 1)
        return "".join(self.lines[n - 1] for n in numbers if n not in inner)

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.own_text(name).encode()).hexdigest()
