# SPDX-License-Identifier: Apache-2.0
"""The series applies to the release, patch by patch, and its tests pass there."""

import ast
import re
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from zipfile import ZipFile

import pytest

from tools.overlay.base import pinned_wheel
from tools.overlay.tree import Release, edit_files
from tools.upstream.__main__ import main
from tools.upstream.export import files_by_patch
from tools.upstream.series import load
from tools.upstream.trial import run_tests

THERE = "tests/v1/spec_decode/unified"
# Some tests of the series: settings and layout.
FAST = [
    f"{THERE}/config/test_sampling_params.py",
    f"{THERE}/config/test_speculators.py",
    f"{THERE}/worker/gpu/spec_decode/test_unified_layout.py",
]
MOST_LINES = 800  # of a patch without its tests: as much as a maintainer can review


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    with ZipFile(pinned_wheel()) as wheel:
        yield Release(wheel)


@pytest.fixture(scope="module")
def patches(release) -> list[dict[str, str]]:
    """Texts of the files that each patch adds or changes, by path."""
    return list(files_by_patch(load(), release))


def test_patches_import_only_earlier_files(release, patches):
    """Files of the series that a patch imports exist once the patch is applied."""
    missing, known = [], set(release.names)
    added = {path for files in patches for path in files}
    for files in patches:
        known |= files.keys()
        for path, text in files.items():
            if path.endswith(".py"):
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


@pytest.fixture(scope="module")
def our_lines(release, patches) -> dict[str, dict[str, str]]:
    """Texts that each patch adds, by path, by the patch's title."""
    found, edits = {}, edit_files()
    for patch, files in zip(load().patches, patches, strict=True):
        new = {path: text for path, text in files.items() if path not in release.names}
        for edit in edits:
            hunks = edit.hunks({patch.slug})
            new[edit.path] = "".join(line for hunk in hunks for line in hunk.lines)
        found[patch.title] = new
    return found


def test_patch_sizes(our_lines):
    for title, files in our_lines.items():
        code = (text for path, text in files.items() if path.startswith("vllm/"))
        assert sum(text.count("\n") for text in code) <= MOST_LINES, title


def test_patches_do_not_mention_this_repository(our_lines):
    ours = re.compile(r".*\b(AnyDraft|\w+\.edit|overlay|from tools|import tools)\b.*")
    for title, files in our_lines.items():
        assert ours.findall("\n".join(files.values())) == [], title


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The release's files with the series on top, importable."""
    folder = tmp_path_factory.mktemp("series")
    assert main(["export", "--output", str(folder)]) == 0
    assert len(list(folder.glob("*.patch"))) == len(load().patches)
    return folder / "tree"


@pytest.mark.slow
def test_tests_pass_on_the_patched_tree(tree, monkeypatch):
    monkeypatch.setenv("VLLM_TEST_EXAMPLES", "20")
    status, said = run_tests(tree, FAST, "-n", "0")
    assert status == 0, said[-6000:]
    assert re.search(r"\d\d+ passed", said)
