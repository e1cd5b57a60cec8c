# SPDX-License-Identifier: Apache-2.0
"""The page on adding a draft mode, followed to the letter in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm
from tools.docs import DOCS, ROOT
from tools.docs.pages import Fence, fences
from tools.overlay.native import build, compiler

PACKAGE = "vllm/v1/worker/gpu/spec_decode/unified"
TEST = "tests/v1/worker/gpu/spec_decode/test_unified_inputs.py"
EDITS = [f for f in fences(DOCS / "adding-a-mode.md") if f.info.startswith("diff")]


def apply(edit: Fence, root: Path) -> None:
    """Makes the one change that a diff of the page shows."""
    (path,) = re.findall(r'title="(.+)"', edit.info)
    old, new = (
        "".join(line[1:] for line in edit.body.splitlines(True) if line[0] != skipped)
        for skipped in "+-"
    )
    text = (root / path).read_text()
    assert text.count(old) == 1, f"{edit.where}: its old lines are not in {path} once"
    (root / path).write_text(text.replace(old, new))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The tree, and what is installed of it with the unified speculator as files."""
    for folder in (PACKAGE, "csrc", Path(TEST).parent, "tools/overlay"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("CMakeLists.txt", "pyproject.toml", "base.toml", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run_kernel_tests(copy: Path, *flags: str) -> subprocess.CompletedProcess:
    site = copy / "site"
    shutil.rmtree(site, ignore_errors=True)
    installed = Path(vllm.__file__).parent
    shutil.copytree(installed, site / "vllm", copy_function=os.symlink, symlinks=False)
    shutil.rmtree(site / PACKAGE)
    shutil.copytree(copy / PACKAGE, site / PACKAGE)
    assert compiler() is None or build(site, copy) is None
    shutil.rmtree(copy / "vllm", ignore_errors=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    env["VLLM_TEST_EXAMPLES"] = "40"  # of 2000: here it is the page that is tested
    return subprocess.run(
        [*command, *flags], cwd=copy, env=env, capture_output=True, text=True
    )


def test_the_page_works(copy: Path):
    for edit in EDITS:
        apply(edit, copy)
    done = run_kernel_tests(copy, "-k", "equals_reference")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


def test_without_the_kernels_line_it_fails(copy: Path):
    """As the page says of the step before the kernel's; here of its twin."""
    edits = [edit for edit in EDITS if "const int64_t mask =" not in edit.body]
    assert len(edits) == len(EDITS) - 1
    for edit in edits:
        apply(edit, copy)
    done = run_kernel_tests(copy, "-k", "equals_reference and native")
    assert done.returncode == 1, done.stdout
    assert "input_ids" in done.stdout
