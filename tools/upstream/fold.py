# SPDX-License-Identifier: Apache-2.0
"""Folds a seam into the file that it stands on: the file as a patch would have it.

Of an override that calls the base's function once, at the top level of its body, what
stands before the call goes to the beginning of the base's function and what stands
after it to the end, where that means the same: no name means two things, and the base
returns where the seam expects it. Else the base's function keeps its body under a
private name, and the seam's calls it by that. New members, fields, functions and
imports are put in; a statement that sets a global of the base's comes after the last
one that mentions it. Anything else is refused with the reason.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from importlib.util import resolve_name

from .override import Override, private_name
from .seam import Seam, read_seam
from .text import (
    Definition,
    Edits,
    FoldError,
    Source,
    Swap,
    annotations,
    binding,
    bound_names,
    docstring,
    shifted,
    used_names,
    without_docstring,
)

ISORT = 'lint.isort.known-first-party=["vllm", "tests"]'


@dataclass(frozen=True)
class Rule:
    """What folding a seam by its shape alone would not say as a patch should.

    Attributes:
        drop: statements of the seam that are left out, by how they start.
        replace: text that the base, or an addition, has once, to what stands there
            instead.
    """

    drop: tuple[str, ...] = ()
    replace: dict[str, str] = field(default_factory=dict)


def fold(
    path: str,
    base_text: str,
    seam_text: str,
    rule: Rule = Rule(),
    wanted: Callable[[str], bool] = lambda name: True,
    mixins: dict[str, set[str]] | None = None,
    taken: Collection[str] = (),
) -> str:
    """The text of the base's file with the seam folded into it.

    Args:
        path: of both files in the tree.
        wanted: whether to fold a name of the seam: `f`, `Class.member`, or, of a class
            that stands beside the base's in a class's header, `Class(Mixin)`.
        mixins: for classes of ours that a class of the seam has beside the base's,
            the names that they define.
        taken: names that the base uses in any file.

    Raises:
        FoldError: the seam has a shape that is not known, or that would change what
            the base does.
    """
    base = Source(path, base_text)
    seam = read_seam(Source(path, seam_text), base, rule.drop)
    text = Folding(base, seam, wanted, mixins or {}, taken).run(rule)
    left = used_names(text) & {"stand_on", *seam.modules}
    if left or "_upstream" in text:
        raise FoldError(f"{path}: what is folded still mentions {left or '_upstream'}")
    return tidied(text)


def replaced(text: str, path: str, rule: Rule) -> str:
    """The text with what a rule puts in place of other text.

    Raises:
        FoldError: something to replace is not there, or more than once.
    """
    for old, new in rule.replace.items():
        if text.count(old) != 1:
            raise FoldError(f"{path}: has {old!r} {text.count(old)} times")
        text = text.replace(old, new)
    return text


def tidied(text: str) -> str:
    """Formatted as upstream formats, with sorted imports; both as ruff does."""
    sort = ["check", "--select=I", "--fix", "--quiet", f"--config={ISORT}"]
    for command in (sort, ["format"]):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--isolated",
                "--stdin-filename=folded.py",
                "-",
            ],
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise FoldError(
                f"ruff {command[0]}: {done.stderr.strip()}\n"
                "It is in requirements/test.txt."
            )
        text = done.stdout
    return text


class Folding:
    def __init__(
        self,
        base: Source,
        seam: Seam,
        wanted: Callable[[str], bool],
        mixins: dict[str, set[str]],
        taken: Collection[str],
    ):
        self.base, self.seam, self.wanted, self.mixins = base, seam, wanted, mixins
        self.edits, self.texts, self.taken = Edits(), list[str](), taken

    def run(self, rule: Rule) -> str:
        for name, node in self.seam.overrides.items():
            if self.wanted(name):
                self._fold_override(name, node)
        for node in self.seam.classes:
            self._fold_class(node)
        for node in self.seam.loose:
            self._fold_loose(node)
        self.texts += rule.replace.values()
        self._add_imports()
        return replaced(self.base.edited(self.edits), self.base.path, rule)

    # Functions and methods.

    def _fold_override(self, name: str, node: ast.FunctionDef) -> None:
        owner, _, member = name.rpartition(".")
        scope = self.base.tree.body
        if owner:
            scope = self._base_class(owner, node).body
        old = binding(scope, member)
        if isinstance(old, ast.ImportFrom) and name in self.seam.published:
            self._fold_imported(name, node, old)
            return
        if not isinstance(old, ast.FunctionDef | ast.AsyncFunctionDef):
            raise self.seam.source.error(node, f"{name} of the base is no function")
        self._check_published(name, node, old)
        override = Override(
            name, self.seam, self.base, scope, node, old, self.texts, self.taken
        )
        override.fold(self.edits)

    def _fold_imported(
        self, name: str, node: ast.FunctionDef, old: ast.ImportFrom
    ) -> None:
        """The base imports the function: it does so by another name."""
        private = private_name(self.seam, name, self.base.tree.body, self.taken)
        (alias,) = [a for a in old.names if name == (a.asname or a.name)]
        text = self.base.cut([old], [(alias, f"{alias.name} as {private}")])
        self.edits.replace(self.base.start(old), old.end_lineno, text)
        calls = [n for n in ast.walk(node) if isinstance(n, ast.expr)]
        swaps = [(n, private) for n in calls if self.seam.in_base(n) == name]
        self._put(_last_import(self.base, guarded=True), "\n\n", [node], 0, swaps)

    def _check_published(self, name: str, node: ast.stmt, old: ast.stmt) -> None:
        """Folded, an override is what the base's own code calls, too."""
        if "." in name or name in self.seam.published:
            return
        hints = {id(part) for part in annotations(self.base.tree)}
        users = [
            part.lineno
            for part in ast.walk(self.base.tree)
            if isinstance(part, ast.Name) and part.id == name and id(part) not in hints
        ]
        if users:
            raise self.seam.source.error(
                node,
                f"line {users[0]} of the base uses {name}: set upstream.{name} to it",
            )

    def _base_class(self, name: str, node: ast.AST) -> ast.ClassDef:
        found = binding(self.base.tree.body, name)
        if not isinstance(found, ast.ClassDef):
            raise self.seam.source.error(node, f"{name} of the base is no class")
        return found

    # Classes.

    def _fold_class(self, node: ast.ClassDef) -> None:
        old = self._base_class(node.name, node)
        self._check_published(node.name, node, old)
        marks = [{ast.unparse(m) for m in part.decorator_list} for part in (node, old)]
        if not marks[0] <= marks[1]:
            raise self.seam.source.error(node, "has decorators that the base's has not")
        self._add_mixins(node, old)
        self._after = {"field": _last_field(old), "method": old.end_lineno}
        for part, doc in _with_docs(without_docstring(node)):
            (name,) = bound_names([part])
            if self.wanted(f"{node.name}.{name}"):
                self._fold_member(node, old, part, doc, name)

    def _fold_member(
        self,
        node: ast.ClassDef,
        old: ast.ClassDef,
        part: ast.stmt,
        doc: list[ast.stmt],
        name: str,
    ) -> None:
        theirs = binding(old.body, name)
        if isinstance(part, ast.FunctionDef):
            if theirs is not None:
                self._fold_override(f"{node.name}.{name}", part)
                self._after["method"] = theirs.end_lineno
            else:
                self._put(self._after["method"], "\n", [part], 4)
        elif theirs is None:
            self._put(self._after["field"], "", [part, *doc], 4)
        else:
            known = dict(_with_docs(old.body))[theirs]
            last = (known[-1:] if doc else []) or [theirs]
            text = self.seam.text([part, *doc])
            self.texts.append(text)
            self.edits.replace(theirs.lineno, last[0].end_lineno, shifted(text, 4))
            self._after["field"] = last[0].end_lineno

    def _add_mixins(self, node: ast.ClassDef, old: ast.ClassDef) -> None:
        names = [ast.unparse(b) for b in node.bases if self.seam.in_base(b) is None]
        names = [name for name in names if self.wanted(f"{node.name}({name})")]
        if not names:
            return
        for name in names:
            clash = self.mixins.get(name, {"anything"}) & bound_names(old.body)
            if clash:
                raise self.seam.source.error(
                    node, f"{name} and the base's class both define {min(clash)}"
                )
        bases = ", ".join(names + [ast.unparse(base) for base in old.bases])
        if old.keywords or old.body[0].lineno == old.lineno:
            raise self.seam.source.error(node, "the base's class has keywords")
        self.texts.append(", ".join(names))
        head = docstring(old) or old.body
        header = range(old.lineno, self.base.start(head[0]))
        end = next(n for n in header if self.base.lines[n - 1].rstrip().endswith(b":"))
        self.edits.replace(old.lineno, end, f"class {old.name}({bases}):")

    # Everything else.

    def _fold_loose(self, node: ast.stmt) -> None:
        names = bound_names([node])
        if names and not all(map(self.wanted, names)):
            return
        if ast.dump(node) in map(ast.dump, self.base.tree.body):
            return  # such as a logger
        mentioned = self._mentioned(node)
        theirs = names & bound_names(self.base.tree.body)
        if theirs:
            raise self.seam.source.error(
                node, f"defines the base's {min(theirs)}: set it through the base"
            )
        line = max(map(self._last_mention, mentioned), default=0)
        self._put(line or _last_import(self.base, guarded=True), "\n", [node], 0)

    def _mentioned(self, node: ast.stmt) -> set[str]:
        means = (
            self.seam.in_base(n) for n in ast.walk(node) if isinstance(n, ast.expr)
        )
        return {name.partition(".")[0] for name in means if name}

    def _last_mention(self, name: str) -> int:
        """Where the base's module-level code mentions a name for the last time."""
        return max(
            node.end_lineno
            for node in self.base.tree.body
            if not isinstance(node, Definition)
            if name in bound_names([node])
            or any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
        )

    def _put(
        self,
        line: int,
        gap: str,
        body: list[ast.stmt],
        columns: int,
        swaps: Iterable[Swap] = (),
    ) -> None:
        text = self.seam.text(body, list(swaps))
        self.texts.append(text)
        self.edits.after(line, gap + shifted(text, columns))

    def _add_imports(self) -> None:
        used = set().union(*map(_names_in, self.texts))
        known = {alias: node for node, alias in _imported(self.base)}
        lines = []
        for name in sorted(used & self.seam.imports.keys()):
            node = self.seam.imports[name]
            wanted = _import_line(self.seam.source.path, node, name)
            found = known.get(name)
            if found and _import_line(self.base.path, found, name) == wanted:
                continue
            if name in bound_names(self.base.tree.body):
                raise self.seam.source.error(node, f"the base has another {name}")
            lines.append(wanted)
        if lines:
            line = _last_import(self.base)
            text = "".join(f"{text}\n" for text in lines)
            self.edits.after(line, text, ahead=True)


def _names_in(text: str) -> set[str]:
    try:
        return used_names(text)
    except SyntaxError:  # a part of an expression
        return set(text.replace("(", " ").replace(")", " ").split())


def _with_docs(body: list[ast.stmt]) -> list[tuple[ast.stmt, list[ast.stmt]]]:
    """Members of a class body, each with the string that stands below it, if any."""
    found: list[tuple[ast.stmt, list[ast.stmt]]] = []
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if found:
                found[-1][1].append(node)
        else:
            found.append((node, []))
    return found


def _last_field(node: ast.ClassDef) -> int:
    ends = [
        (doc or [part])[-1].end_lineno
        for part, doc in _with_docs(node.body)
        if isinstance(part, ast.Assign | ast.AnnAssign)
    ]
    return max(ends, default=node.body[0].end_lineno)


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _last_import(source: Source, guarded: bool = False) -> int:
    """Where the imports at a module's top end; `guarded` counts those in an `if`."""
    line = 0
    for node in source.tree.body[len(docstring(source.tree)) :]:
        is_guarded = isinstance(node, ast.If) and any(map(_is_import, node.body))
        if not _is_import(node) and not (guarded and is_guarded):
            return line or source.start(node) - 1
        line = node.end_lineno
    return line


def _imported(source: Source) -> list[tuple[ast.stmt, str]]:
    return [
        (node, alias.asname or alias.name)
        for node in source.tree.body
        if _is_import(node)
        for alias in node.names
    ]


def _import_line(path: str, node: ast.stmt, name: str) -> str:
    """An import statement of one name, absolute."""
    (alias,) = [a for a in node.names if name == (a.asname or a.name)]
    text = ast.unparse(alias)
    if isinstance(node, ast.Import):
        return f"import {text}"
    package = path.rpartition("/")[0].replace("/", ".")
    module = resolve_name("." * node.level + (node.module or ""), package)
    return f"from {module} import {text}"
