# SPDX-License-Identifier: Apache-2.0
"""Files, tests, modules, make targets and links that pages name: do they exist?"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from . import DOCS, ROOT
from .pages import fences, links, pages, spans

_FOLDERS = "tests|vllm|tools|benchmarks|docs|examples|csrc|models|requirements"
_PATH = re.compile(rf"^(?P<path>(?:{_FOLDERS})/[\w./*-]*)(?:::(?P<test>\w+))?$")
_MODULE = re.compile(r"\bpython3? -m ([\w.]+)")
_TARGET = re.compile(r"^make ([a-z][\w-]*)", re.MULTILINE)


def unknown_names() -> Iterator[str]:
    """One line for each name on a page that stands for nothing."""
    for page in pages():
        text = page.read_text()
        code = [
            *spans(text),
            *((f.line, f.body) for f in fences(page) if f.info == "bash"),
        ]
        for line, span in code:
            for problem in problems_of(span):
                yield f"{page.relative_to(ROOT)}:{line}: {problem}"
        # mkdocs checks the links below docs/.
        for line, target in [] if DOCS in page.parents else links(text):
            if not _is_linked(page, target):
                yield f"{page.relative_to(ROOT)}:{line}: no such file: {target}"


def problems_of(span: str) -> Iterator[str]:
    """What a piece of code on a page names and is not there."""
    if (named := _PATH.match(span)) and not _exists(named["path"]):
        yield f"no such file: {span}"
    elif named and named["test"] and named["test"] not in tests_of(named["path"]):
        yield f"no such test: {span}"
    for module in _MODULE.findall(span):
        if not _is_module(module):
            yield f"no such module: {module}"
    for target in _TARGET.findall(span):
        if target not in make_targets():
            yield f"no such make target: {target}"


def _exists(path: str) -> bool:
    """Whether it is in the repository or, below vllm/, in the base that it overlays, or
    is where the exported series puts files."""
    if f'"{path.rstrip("/")}"' in (ROOT / "tools/upstream/series.toml").read_text():
        return True
    roots = [ROOT]
    if path.startswith("vllm/") and (base := find_spec("vllm")):
        roots += [Path(place).parent for place in base.submodule_search_locations]
    return any(next(root.glob(path.rstrip("/")), None) for root in roots)


@cache
def tests_of(path: str) -> frozenset[str]:
    """Names of the test functions and classes in a file."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    named = (node.name for node in ast.walk(tree) if isinstance(node, kinds))
    return frozenset(name for name in named if name.lower().startswith("test"))


def _is_module(name: str) -> bool:
    file = ROOT.joinpath(*name.split("."))
    if file.with_suffix(".py").is_file() or (file / "__main__.py").is_file():
        return True
    return name.split(".")[0] not in ("tools", "benchmarks") and _is_installed(name)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@cache
def make_targets() -> frozenset[str]:
    text = (ROOT / "Makefile").read_text()
    return frozenset(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))


def _is_linked(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True  # another site
    path = target.partition("#")[0]
    return not path or (page.parent / path).exists()
