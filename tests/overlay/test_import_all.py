# SPDX-License-Identifier: Apache-2.0
"""In the installed tree, all that we add or change can be imported."""

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.overlay.base import ROOT
from tools.overlay.seams import overlay_files, upstream_place
from tools.overlay.sources import defined, members
from tools.overlay.trial import import_errors, module_name

# Imported once, before the processes that start with one module each are forked.
HEAVY = ["torch", "torch._inductor.standalone_compile", "transformers", "openai"]
EACH_FIRST = """
import importlib, os, sys, traceback
heavy, modules = (names.split() for names in sys.argv[1:])
for name in heavy:
    importlib.import_module(name)
assert "vllm" not in sys.modules
for name in modules:
    child = os.fork()
    if child == 0:
        try:
            first = importlib.import_module(name)
            seam = importlib.import_module(name.replace("._upstream", "", 1))
            assert seam.__upstream__ is first
            os._exit(0)
        except BaseException:
            print(name, traceback.format_exc(), flush=True)
            os._exit(1)
    os.waitpid(child, 0)
"""


@cache
def tree() -> Path:
    return Path(find_spec("vllm").origin).parents[1]


def our_files() -> list[str]:
    return [path for path in overlay_files(ROOT) if path.endswith(".py")]


def our_seams() -> list[str]:
    return [
        path
        for path in our_files()
        if (tree() / upstream_place(path)).exists()
        and path != "vllm/_upstream/__init__.py"
    ]


def replaced_classes() -> set[str]:
    """Classes of the base that a seam defines anew."""
    found = set()
    for path in our_seams():
        theirs = members((tree() / upstream_place(path)).read_text())
        nodes = defined(ast.parse((ROOT / path).read_text()).body)
        names = {name for name, node in nodes if isinstance(node, ast.ClassDef)}
        found |= names & theirs.keys()
    return found


def subclassing_files(names: set[str]) -> list[str]:
    """Files of the base with a class above which one of these names stands."""
    if not names:
        return []
    pattern = re.compile(rf"^class \w+\([^)]*\b({'|'.join(names)})\b", re.MULTILINE)
    files = (str(path.relative_to(tree())) for path in (tree() / "vllm").rglob("*.py"))
    return sorted(path for path in files if pattern.search((tree() / path).read_text()))


@pytest.fixture(scope="module")
def subclassing() -> list[str]:
    return [module_name(path) for path in subclassing_files(replaced_classes())]


@pytest.fixture(scope="module")
def errors(subclassing) -> dict[str, str]:
    ours = [module_name(path) for path in our_files()]
    return import_errors(ours + subclassing, TRITON_INTERPRET="0")


def test_overlay(errors, subclassing):
    assert {k: v for k, v in errors.items() if k not in subclassing} == {}


def test_subclasses_of_what_we_replace(errors, subclassing):
    theirs = {module: errors[module] for module in subclassing if module in errors}
    lacking = {
        module: error
        for module, error in theirs.items()
        if error.startswith("ModuleNotFoundError") and "'vllm" not in error
    }
    assert {k: v for k, v in theirs.items() if k not in lacking} == {}
    if lacking:
        pytest.skip(f"this environment has not all they need: {lacking}")


def test_each_moved_module_first():
    modules = [module_name(upstream_place(path)) for path in our_seams()]
    command = [sys.executable, "-P", "-c", EACH_FIRST, " ".join(HEAVY)]
    done = subprocess.run(
        [*command, " ".join(modules)], capture_output=True, text=True, check=True
    )
    failures = re.findall(r"(?ms)^vllm\._upstream\S* Traceback.*", done.stdout)
    assert failures == []
