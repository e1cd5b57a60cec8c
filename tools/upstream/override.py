# SPDX-License-Identifier: Apache-2.0
"""Folds one function that overrides the base's: into its body, or around it."""

import ast
from collections.abc import Collection
from dataclasses import dataclass

from .seam import Seam
from .text import (
    Edits,
    FoldError,
    Source,
    Swap,
    binding,
    bound_names,
    docstring,
    own_nodes,
    shifted,
    without_docstring,
)


@dataclass
class Override:
    """`new` of a seam takes the place of `old` of the base, which it may call.

    Attributes:
        name: the base's, `f` or `Class.method`.
        scope: the body that `old` stands in, the module's or a class's.
        texts: what has been put into the base so far, for its imports.
        taken: names that the base uses anywhere.
    """

    name: str
    seam: Seam
    base: Source
    scope: list[ast.stmt]
    new: ast.FunctionDef
    old: ast.FunctionDef
    texts: list[str]
    taken: Collection[str] = ()

    def __post_init__(self) -> None:
        self.owner, _, self.member = self.name.rpartition(".")
        marks = {ast.unparse(mark) for mark in self.old.decorator_list}
        self.is_static = "staticmethod" in marks
        self.is_property = "property" in marks
        self.originals = [n for n in ast.walk(self.new) if self._is_original(n)]
        meant = [n for n in ast.walk(self.new) if self._means_old(n)]
        if len(meant) != len(self.originals):
            raise self.seam.source.error(
                self.new, f"uses the base's {self.name} other than to call it: call it"
            )

    def _means_old(self, node: ast.AST) -> bool:
        """Whether an expression is the base's function itself."""
        of_super = isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            "super()",
        )
        if of_super:
            return node.attr == self.member
        return isinstance(node, ast.expr) and self.seam.in_base(node) == self.name

    def _is_original(self, node: ast.AST) -> bool:
        """Whether an expression is the base's result."""
        if self.is_property:
            return self._means_old(node)
        return isinstance(node, ast.Call) and self._means_old(node.func)

    def fold(self, edits: Edits) -> None:
        if isinstance(self.old, ast.AsyncFunctionDef):
            raise self.seam.source.error(self.new, f"{self.name} of the base is async")
        if not self._fold_into(edits):
            self._fold_around(edits)

    # Into the base's function: what comes before its body, and what after.

    def _fold_into(self, edits: Edits) -> bool:
        body = without_docstring(self.new)
        places = [
            at
            for at, node in enumerate(body)
            if getattr(node, "value", None) in self.originals
        ]
        if len(self.originals) != 1 or len(places) != 1:
            return False
        before, holder, after = (
            body[: places[0]],
            body[places[0]],
            body[places[0] + 1 :],
        )
        given = self._arguments(holder.value)
        if given is None or not self._fits(before, holder, after):
            return False
        start = self.seam.text(before) + "".join(f"{p} = {e}\n" for p, e in given)
        self._put_before(edits, start)
        if isinstance(holder, ast.Assign):
            self._take_result(edits, holder.targets[0].id)
        if after:
            last = self.old.body[-1]
            returns = isinstance(last, ast.Return) and isinstance(holder, ast.Expr)
            line = last.lineno - 1 if returns else last.end_lineno
            self._put(edits, line, self.seam.text(after))
        return True

    def _put(self, edits: Edits, line: int, text: str) -> None:
        self.texts.append(text)
        edits.after(line, shifted(text, self.old.body[0].col_offset))

    def _put_before(self, edits: Edits, text: str) -> None:
        doc, first = docstring(self.old), self.old.body[0]
        line = doc[0].end_lineno if doc else self.base.start(first) - 1
        if text:
            self._put(edits, line, text)

    def _take_result(self, edits: Edits, name: str) -> None:
        """`return x` at the base's end becomes `name = x`."""
        last = self.old.body[-1]
        if isinstance(last.value, ast.Name) and last.value.id == name:
            edits.replace(last.lineno, last.end_lineno, "")
            return
        text = self.base.cut([last]).replace("return ", f"{name} = ", 1)
        edits.replace(last.lineno, last.end_lineno, shifted(text, last.col_offset))

    def _arguments(self, call: ast.expr) -> list[tuple[str, str]] | None:
        """Parameters that the seam calls the base with another value for, if it may."""
        theirs, ours = (_parameters(node) for node in (self.old, self.new))
        if ours[: len(theirs)] != theirs[: len(ours)]:
            return None
        if isinstance(call, ast.Attribute):
            return []
        bound = not self.is_static and ast.unparse(call.func).startswith("super()")
        left = theirs[1:] if bound else list(theirs)
        stars = {arg.arg for arg in (self.new.args.vararg, self.new.args.kwarg) if arg}
        passed: list[tuple[str, str]] = []
        for argument in call.args:
            if isinstance(argument, ast.Starred):
                if ast.unparse(argument.value) not in stars:
                    return None
                continue
            if not left:
                return None
            passed.append((left.pop(0), ast.unparse(argument)))
        for keyword in call.keywords:
            if keyword.arg is None and ast.unparse(keyword.value) in stars:
                continue
            if keyword.arg not in left:
                return None
            left.remove(keyword.arg)
            passed.append((keyword.arg, ast.unparse(keyword.value)))
        if left and not stars:
            return None
        given = [(name, text) for name, text in passed if name != text]
        return given if len(given) < 2 else None

    def _fits(
        self, before: list[ast.stmt], holder: ast.stmt, after: list[ast.stmt]
    ) -> bool:
        """Whether two bodies can be one: same ends, and no name means two things."""
        nodes = own_nodes(self.old.body)
        if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
            return False
        returns = [node for node in nodes if isinstance(node, ast.Return)]
        if isinstance(holder, ast.Return):
            ends_fit = not after
        elif isinstance(holder, ast.Expr):
            # A name that the base returns at its end, to nobody: ours has no result.
            returns = [r for r in returns if r.value or after]
            ends_fit = not returns or returns == [_returned_name(self.old)]
        else:
            ends_fit = isinstance(holder, ast.Assign) and returns == self.old.body[-1:]
        return ends_fit and not self._clashes(before, holder, after)

    def _clashes(
        self, before: list[ast.stmt], holder: ast.stmt, after: list[ast.stmt]
    ) -> set[str]:
        """Names that would mean two things, were the bodies one."""
        arguments, given = self.new.args, set(_parameters(self.new))
        stars = {arg.arg for arg in (arguments.vararg, arguments.kwarg) if arg}
        theirs = {n.id for n in ast.walk(self.old) if isinstance(n, ast.Name)}
        written = bound_names(self.old.body)
        ours, read = bound_names([*before, holder, *after]), _read([*before, *after])
        result = _returned_name(self.old)
        if result and isinstance(holder, ast.Assign):
            shared = {result.value.id} & bound_names([holder])
            ours, read, written = ours - shared, read - shared, written - shared
        local = written | set(_parameters(self.old))
        return (
            (ours & theirs)
            | (read & stars)
            | (read & (local - given - ours))
            | (_read(after) & given & written)
        )

    # Around it: the base's function gets a private name, and ours calls it.

    def _fold_around(self, edits: Edits) -> None:
        if self.name in self.seam.registered:
            raise self.seam.source.error(
                self.new,
                f"the base's {self.name} is registered by its decorator: call it once, "
                "at the top level of the override, so that both can be one function",
            )
        private = private_name(self.seam, self.name, self.scope, self.taken)
        if self.originals:
            self._rename(edits, private)
        else:
            first = self.base.start(self.old)
            edits.replace(first, self.old.end_lineno, "")
        gap = "\n" if self.owner else "\n\n"
        text = self._renamed(private)
        self.texts.append(text)
        columns = self.old.col_offset
        edits.after(self.old.end_lineno, gap + shifted(text, columns))

    def _rename(self, edits: Edits, private: str) -> None:
        line = self.old.lineno
        text = self.base.lines[line - 1].decode()
        new = text.replace(f"def {self.member}(", f"def {private}(", 1)
        edits.replace(line, line, new)

    def _renamed(self, private: str) -> str:
        """The seam's function, by the base's name, calling the private one."""
        swaps: list[Swap] = []
        for node in self.originals:
            function = node if self.is_property else node.func
            of_super = ast.unparse(function).startswith("super()")
            first = next(iter(_parameters(self.new)), "")
            owner = first if of_super and not self.is_static else self.owner
            swaps.append((function, f"{owner}.{private}" if owner else private))
        if self.owner and self.new.args.args and not self.new.col_offset:
            first = self.new.args.args[0]
            swaps.append((first, first.arg))
        text = self.seam.text([self.new], swaps)
        return text.replace(f"def {self.new.name}(", f"def {self.member}(", 1)


def private_name(
    seam: Seam, name: str, scope: list[ast.stmt], taken: Collection[str]
) -> str:
    """Another name for the base's function, that nothing of the base has.

    A subclass or an ancestor in another file of the base may have it, too.
    """
    plain = name.rpartition(".")[2].strip("_")
    names = [ours for ours, base in seam.aliases.items() if base == name]
    names += [f"_{plain}", f"_plain_{plain}"]
    for known in names:
        if known not in taken and binding(scope, known) is None:
            return known
    raise FoldError(f"{seam.source.path}: the base has {', '.join(names)}")


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every]


def _returned_name(node: ast.FunctionDef) -> ast.Return | None:
    last = node.body[-1]
    is_name = isinstance(getattr(last, "value", None), ast.Name)
    return last if isinstance(last, ast.Return) and is_name else None


def _read(body: list[ast.stmt]) -> set[str]:
    nodes = (node for part in body for node in ast.walk(part))
    return {node.id for node in nodes if isinstance(node, ast.Name)}
