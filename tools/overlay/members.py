# SPDX-License-Identifier: Apache-2.0
"""The members of a Python file: functions, classes, methods, and assigned names."""

import ast
import hashlib
import io
from collections.abc import Iterator
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

from .base import OverlayError

MODULE, IMPORTS = "module", "imports"  # hunk locations that are not members
DEFINITION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Member(NamedTuple):
    """Lines are 1-based, and include decorators and the docstring of a field."""

    name: str
    first: int
    last: int
    node: ast.stmt


def defined(body: list[ast.stmt], owner: str = "") -> Iterator[Member]:
    """Members that a body defines, those of its classes included.

    Under statements such as if, try and with, functions and classes only.
    """
    for node, after in zip(body, [*body[1:], None], strict=False):
        if (name := _assigned(node)) is not None:
            value = after.value if isinstance(after, ast.Expr) else None
            last = (after if isinstance(value, ast.Constant) else node).end_lineno
            yield Member(owner + name, node.lineno, last, node)
        elif isinstance(node, DEFINITION):
            first = min(part.lineno for part in [node, *node.decorator_list])
            yield Member(owner + node.name, first, node.end_lineno, node)
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{owner}{node.name}.")
        else:
            for block in ("body", "handlers", "orelse", "finalbody"):
                inner = getattr(node, block, [])
                yield from defined([n for n in inner if _assigned(n) is None], owner)


def _assigned(node: ast.stmt) -> str | None:
    """The one name that a statement assigns to; None if it does something else."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    if len(targets) == 1 and isinstance(targets[0], ast.Name):
        return targets[0].id
    return None


class Source:
    """A module's text, and its members by qualified name.

    The second definition of a name, such as an overload or a setter, is `name[2]`.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.lines = list(io.StringIO(text))  # by line ends as ast counts them

    @cached_property
    def tree(self) -> ast.Module:
        """Raises OverlayError if the text is not valid Python."""
        try:
            return ast.parse(self.text)
        except SyntaxError as problem:
            where = f"{self.path}:{problem.lineno}"
            raise OverlayError(f"{where}: {problem.msg}, mend it") from None

    @cached_property
    def members(self) -> dict[str, Member]:
        found: dict[str, Member] = {}
        for member in defined(self.tree.body):
            name, count = member.name, 1
            while name in found:
                count += 1
                name = f"{member.name}[{count}]"
            found[name] = member._replace(name=name)
        return found

    @cached_property
    def last_import(self) -> int:
        """Last line of the imports before the first function or class.

        Without imports, last line of the docstring or of the comments at the top.
        """
        top = list(takewhile(lambda n: not isinstance(n, DEFINITION), self.tree.body))
        imports = [n for n in top if isinstance(n, (ast.Import, ast.ImportFrom))]
        if imports or ast.get_docstring(self.tree) is not None:
            return [*top[:1], *imports][-1].end_lineno
        return len(list(takewhile(lambda line: line.startswith("#"), self.lines)))

    def span(self, name: str) -> tuple[int, int] | None:
        """First and last line of a member or of the module; None without the member."""
        if name == MODULE:
            return 1, len(self.lines)
        member = self.members.get(name)
        return member and (member.first, member.last)

    def innermost(self, first: int, last: int) -> str:
        """The smallest member that contains these lines, or else the module."""
        held = (m for m in self.members.values() if m.first <= first and last <= m.last)
        least = min(held, key=lambda m: m.last - m.first, default=None)
        return least.name if least else MODULE

    def own_lines(self, name: str) -> list[str]:
        """A member's lines; for a class or the module, the code outside its members."""
        if (span := self.span(name)) is None:
            return []
        first, last = span
        if name != MODULE and not isinstance(self.members[name].node, ast.ClassDef):
            return self.lines[first - 1 : last]
        inner = set()
        for member in self.members.values():
            if name == MODULE or member.name.startswith(f"{name}."):
                inner.update(range(member.first, member.last + 1))
        lines = (self.lines[n - 1] for n in range(first, last + 1) if n not in inner)
        return [line for line in lines if line.strip()[:1] not in ("", "#")]

    def digest(self, name: str) -> str:
        return hashlib.sha256("".join(self.own_lines(name)).encode()).hexdigest()
