# SPDX-License-Identifier: Apache-2.0
"""What this tree may raise, from the statements in its source."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import DOCS, ROOT

VARIES = "…"
ENOUGH = 3  # words tell an error from others


@dataclass(frozen=True)
class Raise:
    """A `raise` statement.

    Attributes:
        path: of the file, from the repository's root.
        function: that it stands in.
        error: name of the exception's class; "" where a caught one is raised again.
        text: its message, with `…` for what varies.
    """

    path: str
    line: int
    function: str
    error: str
    text: str

    def is_listed(self, errors: Iterable[str]) -> bool:
        """Whether one of the errors can be an excerpt of the message, from its first
        words on."""
        text = words(self.text)
        return any(is_excerpt(words(error), text) for error in errors)


def words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(rf"{VARIES}|\w+", text))


def is_excerpt(excerpt: tuple[str, ...], text: tuple[str, ...]) -> bool:
    """Whether `excerpt` can stand in a text, `…` being any words in either one. The
    first words of the text that do not vary must be among them."""
    fixed = [at for at, word in enumerate(text) if word != VARIES][:ENOUGH]

    @cache
    def matches(at: int, of: int) -> bool:
        """Whether excerpt[at:] can stand where text[of:] does."""
        if at == len(excerpt):
            return bool(fixed) and of > fixed[-1]
        if of == len(text):
            return bool(fixed) and set(excerpt[at:]) == {VARIES}
        if text[of] == VARIES:
            return matches(at + 1, of) or matches(at, of + 1)
        if excerpt[at] == VARIES:
            return matches(at + 1, of) or (of not in fixed and matches(at, of + 1))
        return excerpt[at] == text[of] and matches(at + 1, of + 1)

    return matches(0, 0)


def raises(root: Path = ROOT) -> Iterator[Raise]:
    """Every `raise` below vllm/, in order."""
    for path in sorted((root / "vllm").rglob("*.py")):
        tree = ast.parse(path.read_text())
        known = _constants(tree, root)
        for function, node in _raises(tree):
            error, message = _parts(node)
            name = str(path.relative_to(root))
            yield Raise(name, node.lineno, function, error, _text(message, known))


def _raises(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.Raise]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise):
            yield function, child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _raises(child, child.name if named else function)


def _parts(node: ast.Raise) -> tuple[str, ast.expr | None]:
    """Class and message of what is raised."""
    raised = node.exc
    if isinstance(raised, ast.Call):
        return ast.unparse(raised.func), next(iter(raised.args), None)
    return "" if raised is None else ast.unparse(raised), None


def _constants(tree: ast.Module, root: Path, follow: bool = True) -> dict[str, str]:
    """Strings by the names that a module gives them, or imports from its neighbours."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and follow:
            found |= _imported(node, root)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = str(node.value.value)
    return found


def _imported(node: ast.ImportFrom, root: Path) -> dict[str, str]:
    file = root / f"{(node.module or '').replace('.', '/')}.py"
    if not file.is_file():
        return {}
    there = _constants(ast.parse(file.read_text()), root, follow=False)
    names = {(alias.asname or alias.name): alias.name for alias in node.names}
    return {ours: there[name] for ours, name in names.items() if name in there}


def _text(node: ast.expr | None, known: dict[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return " ".join(str(node.value).split())
    if isinstance(node, ast.Name):
        return known.get(node.id, VARIES)
    if isinstance(node, ast.JoinedStr):
        values = (
            part.value if isinstance(part, ast.FormattedValue) else part
            for part in node.values
        )
        parts = (
            part.value if isinstance(part, ast.Constant) else _text(part, known)
            for part in values
        )
        return "".join(map(str, parts))
    return VARIES


def listed_errors() -> list[str]:
    """The first cell of each row of the page on errors."""
    text = (DOCS / "troubleshooting.md").read_text()
    return re.findall(r"^\| `(.*?)` \| .+ \| .+ \|$", text, re.MULTILINE)
