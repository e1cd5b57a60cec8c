# SPDX-License-Identifier: Apache-2.0
"""The series applies to the release, patch by patch, and its tests pass there."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec, resolve_name
from pathlib import Path

import pytest

from tools.overlay.base import pinned_base, target_device
from tools.upstream.__main__ import main
from tools.upstream.export import git
from tools.upstream.trial import apply, failing_imports, run_tests, touched

THERE = "tests/v1/spec_decode/unified"
# Some tests of the series: settings, layout, one kernel.
FAST = [
    f"{THERE}/config/test_sampling_params.py",
    f"{THERE}/config/test_speculators.py",
    f"{THERE}/kernels/test_interpreted.py",
    f"{THERE}/worker/gpu/spec_decode/test_unified_layout.py",
]
MOST_LINES = 800  # of a patch without its tests: as much as a maintainer can review


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The release's files with the series on top, importable."""
    folder = tmp_path_factory.mktemp("series")
    assert main(["export", "--output", str(folder / "patches")]) == 0
    patches = sorted((folder / "patches").glob("*.patch"))
    apply(patches, pinned_base(target_device()), folder / "tree")
    return folder / "tree"


def commits(tree: Path) -> list[str]:
    return git(tree, "rev-list", "--reverse", "HEAD").split()[1:]


def test_patches_import_only_earlier_files(tree):
    """Files of the series that a patch imports exist once the patch is applied."""
    missing = []
    added = {path for commit in commits(tree) for path in touched(tree, commit)}
    for commit in commits(tree):
        known = set(git(tree, "ls-tree", "-r", "--name-only", commit).splitlines())
        for path in touched(tree, commit):
            if path.endswith(".py"):
                text = git(tree, "show", f"{commit}:{path}")
                wanted = set(imported_files(path, text)) & added
                missing += [f"{path}: {file}" for file in sorted(wanted - known)]
    assert missing == []


def imported_files(path: str, text: str) -> Iterator[str]:
    """Files that imports may refer to, except imports under TYPE_CHECKING."""
    package = path.rpartition("/")[0].replace("/", ".")
    tree = ast.parse(text)
    typing = [n for n in tree.body if isinstance(n, ast.If)]
    typing = [n for n in typing if ast.unparse(n.test) == "TYPE_CHECKING"]
    unseen = {id(part) for node in typing for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in unseen:
            module = resolve_name("." * node.level + (node.module or ""), package)
            for name in (module, *(f"{module}.{alias.name}" for alias in node.names)):
                yield name.replace(".", "/") + ".py"


def test_patch_sizes(tree):
    for commit in commits(tree):
        stat = git(tree, "show", "--numstat", "--format=", commit, "--", "vllm")
        lines = sum(int(line.split()[0]) for line in stat.splitlines())
        assert lines <= MOST_LINES, git(tree, "log", "-1", "--format=%s", commit)


def test_patches_do_not_mention_this_repository(tree):
    ours = re.compile(r"\b(AnyDraft|\w+\.edit|overlay|from tools|import tools)\b")
    patches = (tree.parent / "patches").glob("*.patch")
    lines = (line for patch in patches for line in patch.read_text().splitlines())
    assert [line for line in lines if line[:1] == "+" and ours.search(line)] == []


def test_modules_import(tree):
    files = {path for commit in commits(tree) for path in touched(tree, commit)}
    failing = failing_imports(tree, sorted(files))
    if find_spec("torchvision") is None:  # which CPU installations lack
        failing = {m: why for m, why in failing.items() if "torchvision" not in why}
    assert failing == {}


def test_tests_pass_on_the_patched_tree(tree, monkeypatch):
    monkeypatch.setenv("VLLM_TEST_EXAMPLES", "20")
    status, said = run_tests(tree, FAST, "-n", "0")
    assert status == 0, said[-6000:]
    assert re.search(r"\d\d+ passed", said)
